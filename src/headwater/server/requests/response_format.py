"""What an answer must look like, in OpenAI's words."""

from __future__ import annotations

from typing import Any

from headwater.server.http.errors import BadRequest

Schema = dict[str, Any]


def answer_schema(response_format: Any) -> Schema | None:
    """The JSON schema that the answer has to fit, None for any text. Raises BadRequest for what is none of the three.

    A schema is enforced whether it is "strict" or not: an answer that fits is never the worse for it.
    """
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema"}:
            raise BadRequest("response_format is of type 'json_schema' without a json_schema.schema", "response_format")
    raise BadRequest(
        f"response_format is {repr(response_format)[:100]}, its type must be 'text', 'json_object' or 'json_schema'",
        "response_format",
    )
