"""`headwater eval` and `headwater fidelity`: quality of a server's answers, and of prompts composed of segments.

Each measure of `eval` reads its files before a server is started, then prints tables, and returns their figures as JSON
and whether there was any answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer import Option

from headwater.cli import common
from headwater.cli.models import named, whole_folder
from headwater.config import WEIGHTS
from headwater.errors import ConfigError
from headwater.evaluate import divergence, perplexity, tables
from headwater.evaluate.asking import Run, Scored, require_jsonschema
from headwater.evaluate.items import DEFAULT_TASKS, Item, drawn, read_items
from headwater.evaluate.modes import MODES, PAIRED, SEGMENTS, SINGLE
from headwater.evaluate.server import Server, own_server
from headwater.evaluate.summary import Comparison, as_json, sliced
from headwater.journal import Journal
from headwater.request import Fidelity

Json = dict[str, Any]
Measure = Callable[[Server], tuple[Json, bool]]


@common.commands.command("eval")
def evaluate(
    context: typer.Context,
    model: common.Model = None,
    url: Annotated[str | None, Option(help="A running server; without it, one is started.")] = None,
    api_key: common.ApiKey = None,
    model_name: common.ServedModel = None,
    memory: Annotated[str, Option(help=f"For a server that is started. {common.HELP['memory']}")] = "1GB",
    weights: Annotated[str, Option(help=f"For a server that is started. {common.HELP['weights']}")] = "auto",
    tasks: Annotated[
        Path, Option(help="Items to ask: JSON lines, plain or packed.", show_default="held-out set")
    ] = DEFAULT_TASKS,
    limit: Annotated[int | None, Option(min=1, help="Ask only N items, of each kind as many as possible.")] = None,
    text: Annotated[
        Path | None, Option(help="Measure the perplexity of this text instead.", exists=True, dir_okay=False)
    ] = None,
    window: Annotated[int, Option(min=2, help="Tokens of the text that one request scores.")] = 1024,
    against: Annotated[
        str | None, Option(help="URL of another server: measure the divergence of next tokens instead.")
    ] = None,
    paired: Annotated[
        bool, Option("--paired", help=f"Ask each item in the modes {', '.join(PAIRED)}, and compare.")
    ] = False,
    segments: Annotated[
        bool, Option("--segments", help=f"Ask items with documents, as segments, in the modes {', '.join(SEGMENTS)}.")
    ] = False,
    max_tokens: Annotated[int, Option(min=1, help="Limit of each answer's length.")] = 128,
    thinking: Annotated[bool, Option("--thinking", help="Let the model reason first.")] = False,
    concurrency: Annotated[int, Option(min=1, help="Groups of items that are asked in parallel.")] = 4,
    timeout: Annotated[float, Option(min=0.001, help="Limit in seconds for each answer.")] = 600.0,
    seed: Annotated[int, Option(min=0, help="Seed of the bootstrap.")] = 0,
    json_file: common.JsonFile = None,
) -> None:
    """Score a server's answers to questions with known answers.

    Prints exact match, token F1, well-formed tool calls and cached tokens.
    """
    options = SimpleNamespace(**context.params)  # the same values under the same names
    if model is not None and url is not None:
        raise ConfigError(f"model is {model} and url is {url}: give one of them")
    if common.one_of("weights", weights, WEIGHTS) != "auto" and url is not None:
        raise ConfigError(f"weights is {weights} and url is {url}: a running server holds its weights already")
    common.prepare_outputs(json_file)
    measure = measure_of(options)
    with serving(options) as server:
        found, answered = measure(server)
        common.write_json(json_file, {**common.provenance(vars(options)), "server": server.about, **found})
        Journal(json_file, None).end()
    if not answered:
        raise typer.Exit(1)


@contextmanager
def serving(options: SimpleNamespace) -> Iterator[Server]:
    """Connect to the server of --url, or start one."""
    if options.url is None:
        whole_folder(named(options.model))  # here, where the progress of a download is shown
    own = options.model, options.memory, options.weights
    found = own_server(*own) if options.url is None else nullcontext(options.url)
    with found as url, closing(server_at(options, url)) as server:
        yield server


def server_at(options: SimpleNamespace, url: str) -> Server:
    try:
        return Server(url, options.api_key, options.model_name, options.timeout)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def measure_of(options: SimpleNamespace) -> Measure:
    """Choose what to measure. Raises ConfigError or TraceError for a malformed file."""
    compared = [f"--{name}" for name in ("paired", "segments", "against") if getattr(options, name)]
    if len(compared) > 1 or (options.text is not None and compared not in ([], ["--against"])):
        asked = [*(["--text"] if options.text is not None else []), *compared]
        raise ConfigError(f"{' and '.join(asked)} measure different things: give one of them")
    if options.text is not None:
        return partial(of_text, options, perplexity.read_utf8(options.text))
    items = read_items(options.tasks)
    if options.segments:
        items = [item for item in items if item.documents]
        if not items:
            raise ConfigError(f"{options.tasks} has 0 items with documents, --segments needs at least 1")
    items = drawn(items, options.limit)
    if options.against is not None:
        return partial(of_servers, options, items)
    if any(item.kind == "tool" for item in items):
        require_jsonschema()
    return partial(of_items, options, items)


def of_items(options: SimpleNamespace, items: Sequence[Item], server: Server) -> tuple[Json, bool]:
    """Score answers to items, in one mode or several."""
    modes = PAIRED if options.paired else SEGMENTS if options.segments else SINGLE
    with common.progress("asking", len(items) * sum(len(MODES[mode].columns) for mode in modes)) as advance:
        run = run_of(
            options,
            items,
            server,
            logprobs=modes is not SINGLE,
            on_answer=lambda answer: advance(),
            journal=journal_of(options, items, server),
        )
        columns = run.asked(modes)
    answered = any(one.answer.ok for column in columns.values() for one in column)
    return shown(options, columns), answered


def journal_of(options: SimpleNamespace, items: Sequence[Item], server: Server) -> Journal:
    """Return the journal of the answers, with those of an earlier run of the same items, model and options."""
    names = ("url", "model", "paired", "segments", "max_tokens", "thinking")
    digest = blake2b(repr(items).encode(), digest_size=16).hexdigest()
    journal = Journal(options.json_file, [digest, server.model, *(getattr(options, name) for name in names)])
    if journal.found:
        common.progress_console.print(f"answers to {journal.found} groups are from an earlier run", highlight=False)
    return journal


def shown(options: SimpleNamespace, columns: dict[str, list[Scored]]) -> Json:
    """Print the tables of the scored columns; returns their figures."""
    first, *others = columns
    slices = {name: sliced(column, options.seed) for name, column in columns.items()}
    comparisons = {name: Comparison.of(columns[name], columns[first], options.seed) for name in others}
    common.show(tables.sliced_table(first, slices[first]), tables.kinds_by_context(columns[first], options.seed))
    if comparisons:
        common.show(tables.comparison_table(first, comparisons))
    common.show(*(f"{name}: {fault}" for name, column in columns.items() for fault in tables.faults(column)))
    return as_json(columns, slices, comparisons)


def of_servers(options: SimpleNamespace, items: Sequence[Item], server: Server) -> tuple[Json, bool]:
    """Measure the divergence of the first token after each item's prompt from another server's."""
    progress = common.progress("asking both servers", len(items))
    with closing(server_at(options, options.against)) as other, progress as advance:
        pairs, failed = divergence.of_items(run_of(options, items, server), other, advance)
    found = divergence.Divergence.of(pairs, failed, options.seed)
    faults = (f"{count:,} x {message}" for message, count in failed.items())
    common.show(tables.divergence_table(options.against, found), *faults)
    return {"divergence": asdict(found)}, True


def of_text(options: SimpleNamespace, content: str, server: Server) -> tuple[Json, bool]:
    """Measure a text's perplexity; with another server, its perplexity too, and the divergence at every token."""
    tokens, found = server.tokenize(content), {}
    if options.against is None:
        found[server.url] = perplexity.Perplexity.of(content, windows(options, server, tokens, 0))
        apart = None
    else:
        with closing(server_at(options, options.against)) as other:
            perplexity.check_equal(tokens, server, other.tokenize(content), other)
            ours, theirs = (windows(options, one, tokens, divergence.MAX_TOP_LOGPROBS) for one in (server, other))
        found[server.url] = perplexity.Perplexity.of(content, ours)
        found[other.url] = perplexity.Perplexity.of(content, theirs)
        apart = divergence.Divergence.of(divergence.of_windows(ours, theirs), {}, options.seed)
    common.show(tables.perplexity_table(options.window, found))
    figures: Json = {"perplexity": {url: one.as_json() for url, one in found.items()}}
    if apart is not None:
        common.show(tables.divergence_table(options.against, apart))
        figures["divergence"] = asdict(apart)
    return figures, True


def windows(options: SimpleNamespace, server: Server, tokens: Sequence[int], k: int) -> list[perplexity.Window]:
    """Score a text, with the `k` most likely tokens at each position."""
    parts = perplexity.cut(tokens, options.window)
    with common.progress(f"scoring, {server.url}", len(parts)) as advance:
        return perplexity.scored(server, parts, k, options.concurrency, advance)


def run_of(options: SimpleNamespace, items: Sequence[Item], server: Server, **more: Any) -> Run:
    return Run(server, items, options.max_tokens, options.thinking, options.concurrency, **more)


@common.commands.command()
def fidelity(
    context: typer.Context,
    model: common.Model = None,
    prompts: Annotated[
        Path | None, Option(help="Prompts of JSON lines, or a text; without it, a sample.", exists=True, dir_okay=False)
    ] = None,
    cut: Annotated[
        int | None, Option(min=2, help="Use one prompt: N tokens of documents, cut into equal parts.")
    ] = None,
    parts: Annotated[int, Option(min=2, help="Parts of --cut; the first is kept whole.")] = 2,
    count: Annotated[int, Option(min=1, help="Prompts of the sample.")] = 8,
    longest: Annotated[int, Option(min=1, help="Longest prompt of the sample, in tokens.")] = 1024,
    seed: Annotated[int, Option(min=0, help="Seed of the sample.")] = 0,
    ways: Annotated[
        list[Fidelity] | None, Option("--way", help="Method of composing; may be given several times. Without it, all.")
    ] = None,
    skip_attention: Annotated[
        bool, Option("--skip-attention", help="Attention layers add nothing (HYPIC, table 4).")
    ] = False,
    dtype: common.Dtype = "float32",
    weights: common.Weights = "auto",
    threads: Annotated[int | None, Option(min=1, help=common.HELP["threads"])] = None,
    json_file: common.JsonFile = None,
) -> None:
    """Measure prompts composed of segments against whole prompts.

    Prints distances of states, keys and values, and the divergence of next tokens.
    """
    from headwater.lab.fidelity import figures
    from headwater.lab.fidelity.measures import ENDS, studied  # imports torch
    from headwater.lab.fidelity.prompts import Wanted

    common.one_of("weights", weights, WEIGHTS)
    common.prepare_outputs(json_file)
    wanted = Wanted(prompts, cut, parts, count, longest, seed)
    folder = whole_folder(named(model))
    with common.progress_console.status("composing"):
        study = studied(folder, (dtype, weights), threads, wanted, ways or list(Fidelity), skip_attention)
    found = [table(study.means) for table in (figures.means_table, figures.states_table, figures.kept_table)]
    found.append(figures.deviations_table(study.deviations, ENDS))
    common.show(*(table for table in found if table.row_count))
    common.write_json(json_file, {**common.provenance(context.params), **study.as_json()})
