# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ndt doctor` reads of the arguments of `vllm serve` and of the model's config.json, without vllm."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vllm_ndt.health import dashed

TRUE = ("1", "ON", "YES", "TRUE")  # what huggingface_hub takes for true, in any case


class FlagError(Exception):
    """Arguments that cannot be read; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Model:
    """A model: its folder or name, whether it is a folder, and its config.json (empty if it was not found)."""

    name: str
    local: bool
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The config's model_type."""
        return str(self.config.get("model_type") or "")

    @property
    def dtype(self) -> str:
        """The config's dtype without "torch.", also that of its text part."""
        for config in (self.config, self.config.get("text_config")):
            if isinstance(config, Mapping) and (found := config.get("dtype") or config.get("torch_dtype")):
                return str(found).removeprefix("torch.")
        return ""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The config's quantisation; empty if there is none."""
        text = self.config.get("text_config")
        for config in (self.config, text if isinstance(text, Mapping) else {}):
            found = config.get("quantization_config") or config.get("compression_config")
            if isinstance(found, Mapping):
                return found
        return {}


@dataclass(frozen=True)
class Serving:
    """Arguments of `vllm serve`: `dtype` and `quantization` as given, or ""; `processes`: GPUs that work together.

    `any_media`: images and videos may come from any address.
    """

    arguments: tuple[str, ...]
    model: Model
    dtype: str = ""
    quantization: str = ""
    processes: int = 1
    any_media: bool = True


def is_true(environ: Mapping[str, str], *names: str) -> bool:
    """Whether one of the variables is true, as huggingface_hub reads it."""
    return any(environ.get(name, "").upper() in TRUE for name in names)


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> Serving | None:
    """The serving flags, None if there are no arguments; raises FlagError."""
    if not arguments:
        return None
    given = _parse(arguments)
    if given.config:
        given = _parse([*_from_file(given.config), *arguments])  # the command line wins
    first = arguments[0] if not arguments[0].startswith("-") else None
    name = given.model or first or given.model_tag
    if not name:
        raise FlagError(
            f"expected arguments of vllm serve with a model, found {' '.join(arguments)!r}; give --model first"
        )
    return Serving(
        tuple(arguments),
        _model(str(name), environ),
        str(given.dtype or ""),
        str(given.quantization or ""),
        given.tensor_parallel_size * given.pipeline_parallel_size * given.data_parallel_size,
        given.allowed_media_domains is None and not given.language_model_only,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"expected arguments of vllm serve, found: {message}; see vllm serve --help=all")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--model-tag", "--dtype", "--config"):
        parser.add_argument(name)
    parser.add_argument("--quantization", "-q")
    parser.add_argument("--allowed-media-domains", nargs="*")
    parser.add_argument("--language-model-only", action="store_true")
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp")):
        parser.add_argument(f"--{name}-parallel-size", short, type=int, default=1)
    return parser.parse_known_args(dashed(arguments))[0]


def _from_file(path: str) -> list[str]:
    try:
        import yaml

        table = yaml.safe_load(Path(path).read_text("utf-8")) or {}
        items = list(table.items())
    except ImportError:
        raise FlagError("expected PyYAML for --config, found none; install the wheel with its dependencies") from None
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise FlagError(f"expected the server's --config {path}, found {error}; correct --config") from None
    words = []
    for key, value in items:
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is True or (isinstance(value, (str, int)) and value is not False):
            words.append(f"--{key}" if value is True else f"--{key}={value}")
    return words


def _model(name: str, environ: Mapping[str, str]) -> Model:
    folder = Path(name)
    local = folder.exists() or name.startswith(("/", "./", "../"))
    place = folder if local else _in_hub_cache(name, environ)
    try:
        config = json.loads((place / "config.json").read_text("utf-8")) if place else {}
    except (OSError, ValueError):
        config = {}
    return Model(name, local, config if isinstance(config, dict) else {})


def _in_hub_cache(name: str, environ: Mapping[str, str]) -> Path | None:
    """The newest snapshot of a model that was downloaded, where huggingface_hub keeps them."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = Path(os.path.expanduser(os.path.expandvars(cache)), "models--" + name.replace("/", "--"))
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
