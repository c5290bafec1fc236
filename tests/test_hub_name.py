"""Names of models on a hub, as users write them and as the cache's folders hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.hub_name import HubName, name_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3.5-0.8B", HubName("Qwen/Qwen3.5-0.8B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name@main", HubName("org/name")),
    ],
)
def test_name_has_an_organisation_and_perhaps_a_revision(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name
    assert HubName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/org/name",
        "../name",
        "./name",
        "org/../name",
        "a/b/c",
        "org/",
        "org/na me",
        "org--x/name",
        "~/name",
        "",
    ],
)
def test_paths_are_not_parsed_as_hub_names(text: str) -> None:
    assert HubName.parse(text) is None


@pytest.mark.parametrize("revision", ["", "/etc/passwd", "../../x", "a b"])
def test_revision_leaves_no_folder_of_the_cache(revision: str) -> None:
    assert HubName.parse(f"org/name@{revision}") is None


def test_model_name_is_the_hubs_for_cached_folders_only() -> None:
    assert name_of(Path("/cache/hub/models--org--some-name_1.5/snapshots/0123abc")) == "org/some-name_1.5"
    assert name_of(Path("/models/some-name")) == "some-name"
    assert HubName.of_folder(Path("/cache/hub/models--org--name")) is None
