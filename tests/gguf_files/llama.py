"""llama.cpp as a program, for an interpreter that has `xllamacpp` and `gguf`: what it answers, and its quantiser.

python llama.py complete FILE PROMPT_TOKENS TOKENS CHOICES
python llama.py quantise FILE TYPE OUT
python llama.py tokenise FILE TEXTS
"""

import ctypes
import json
import sys
import urllib.request

import numpy as np
import xllamacpp

UNQUANTISED = ("conv1d", "norm", "ffn_gate_inp")  # parts of names, as in llama.cpp's quantiser


def server_of(file: str) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = 2
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.cache_ram_mib = 0
    return xllamacpp.Server(params)


def complete(file: str, prompt: str, n_predict: str, n_probs: str) -> None:
    """Print the greedy tokens, and for each the logarithms of the probabilities of most tokens, as JSON."""
    server = server_of(file)
    request = {
        "prompt": json.loads(prompt), "n_predict": int(n_predict), "n_probs": int(n_probs), "logprobs": int(n_probs),
        "samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "ignore_eos": True, "stream": False,
    }  # fmt: skip
    answer = server.handle_completions(request)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    steps = answer["choices"][0]["logprobs"]["content"]
    likely = [{top["id"]: top["logprob"] for top in step["top_logprobs"]} for step in steps]
    print(json.dumps({"tokens": [step["id"] for step in steps], "likely": likely}))


def tokenise(file: str, texts: str) -> None:
    """Print the tokens of texts, as JSON."""
    server, tokens = server_of(file), []
    for text in json.loads(texts):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", data=body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            tokens.append(json.load(answer)["tokens"])
    print(json.dumps(tokens))


def quantise(file: str, kind: str, out: str) -> None:
    """Write a file of gguf's writer, with the tensors of another that llama.cpp's quantiser has quantised."""
    import gguf

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    to = gguf.GGMLQuantizationType[kind]
    inputs, block = gguf.GGML_QUANT_SIZES[to]
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        x = np.ascontiguousarray(tensor.data)
        plain = not tensor.name.endswith(".weight") or any(part in tensor.name for part in UNQUANTISED)
        if plain or x.ndim < 2 or x.shape[-1] % inputs:
            writer.add_tensor(tensor.name, x)
            continue
        rows, width = x.size // x.shape[-1], x.shape[-1] // inputs * block
        blocks, weights = np.empty((rows, width), np.uint8), np.ones(x.shape[-1], np.float32)
        arrays = (part.ctypes.data_as(ctypes.c_void_p) for part in (x, blocks, weights))
        source, target, importance = arrays
        sizes = (ctypes.c_int64(n) for n in (0, rows, x.shape[-1]))
        library.ggml_quantize_chunk(ctypes.c_int(to), source, target, *sizes, importance)
        writer.add_tensor(tensor.name, blocks.reshape(*x.shape[:-1], width), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    {"complete": complete, "quantise": quantise, "tokenise": tokenise}[sys.argv[1]](*sys.argv[2:])
