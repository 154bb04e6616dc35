# SPDX-License-Identifier: Apache-2.0
"""What a model and its serving flags ask of the encoder cache, as a report for the operator. Starts no engine."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_ndt import encoder_sizing, settings

FINE, WARNING, UNKNOWN = 0, 1, 3
NO_INPUTS = "the model takes no images or videos: nothing to size"
DISABLED = "all images and videos are disabled by the flags: nothing to size"
ENCODER_DECODER = "an encoder-decoder model does not use this cache: nothing to size"
# memory that only MOST_BYTES limits
_PLENTY = 2**62
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class CannotTell(Exception):
    """No report is possible; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Facts:
    """What the report is made of.

    `sizes` and `limits`: embeddings of the largest item and upstream's items a prompt, by modality; `slots`: requests
    at once; `compute_budget` and `cache`: upstream's, in embeddings; `hidden_size` x (1 + `deepstack_layers`) values
    of `dtype`, `value_bytes` each, make one embedding; `states_cached`: chunks end at the blocks of recurrent states,
    of `block` tokens (None: decided when the engine starts); `look_ahead`: a drafter looks one token ahead;
    `kv_memory`: --kv-cache-memory-bytes, if given; `nothing`: why there is nothing to size, or "".
    """

    model: str
    max_model_len: int
    slots: int
    sizes: Mapping[str, int]
    limits: Mapping[str, int]
    compute_budget: int
    cache: int
    hidden_size: int
    deepstack_layers: int
    dtype: str
    value_bytes: int
    states_cached: bool
    block: int | None
    look_ahead: bool
    kv_memory: int | None = None
    nothing: str = ""

    @property
    def width_bytes(self) -> int:
        """Bytes of one embedding."""
        return self.hidden_size * (1 + self.deepstack_layers) * self.value_bytes

    @property
    def item_limit(self) -> int:
        """Embeddings of the largest item that is accepted."""
        return min(self.compute_budget, self.cache)


@dataclass(frozen=True)
class Report:
    """The verdict on `facts`. Without a `demand` there is nothing to size, and the rest has no meaning.

    `stock_at_risk`: stock can come to a standstill; `number` and `why`: the size to ask for, in embeddings;
    `kv_memory`: bytes that it was measured against, None if unknown.
    """

    facts: Facts
    demand: encoder_sizing.Demand | None
    stock_at_risk: bool = False
    number: int = 0
    why: str = ""
    kv_memory: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a full batch fits upstream's cache."""
        return self.demand is None or self.demand.total <= self.facts.cache

    @property
    def number_fits(self) -> bool:
        """Whether a full batch fits a cache of `number` embeddings."""
        return self.demand is None or self.demand.total <= self.number

    @property
    def status(self) -> int:
        """The exit status: a demand that fits puts stock at no risk either."""
        return FINE if self.fits else WARNING

    def lines(self) -> list[str]:
        """The report for a reader."""
        if self.demand is None:
            return [self.facts.nothing]
        return [*_items(self.facts, self.demand, self.number), "", *_columns(self._findings(self.demand))]

    def _findings(self, demand: encoder_sizing.Demand) -> list[tuple[str, str]]:
        facts = self.facts
        each = " + ".join(f"{count} {modality}" for modality, count in demand.items.items())
        rows = [
            ("slots", f"{demand.slots} requests (--max-num-seqs), each up to {each} and {facts.max_model_len} tokens"),
            ("demand", f"{demand.slots} x {demand.per_prompt} = {demand.total} embeddings"),
            ("compute budget", f"{facts.compute_budget} embeddings a step"),
            ("upstream's cache", f"{facts.cache} embeddings, {_size(facts.cache * facts.width_bytes)}"),
            ("one embedding", f"{facts.width_bytes} bytes: {_width(facts)}"),
            ("stock vLLM", self._stock()),
            ("this build", f"never a standstill; {'' if self.fits else 'without the variable '}{_wait(self.fits)}"),
            ("set", self._set()),
            ("refused", f"an item above {facts.item_limit} embeddings, with HTTP 400, whatever the variable says;"),
            ("", "--max-num-batched-tokens raises that limit"),
        ]
        if demand.assumed:
            names = ", ".join(demand.assumed)
            text = (
                f"{names}: upstream allows {encoder_sizing.UNLIMITED} a prompt, {encoder_sizing.ASSUMED} are assumed;"
            )
            rows[1:1] = [("no limit", text), ("", "--limit-mm-per-prompt sets one")]
        return rows

    def _stock(self) -> str:
        if self.stock_at_risk:
            return f"at risk of a standstill: the demand does not fit, and {' and '.join(_causes(self.facts))}"
        if self.fits:
            return "not at risk of a standstill: the demand fits"
        return f"not at risk of a standstill: no states are cached, no drafter looks ahead; {_wait(self.fits)}"

    def _set(self) -> str:
        measured = "; --kv-memory is not given: the rule of 2 GiB alone"
        if self.kv_memory:
            measured = f"; memory for the KV cache: {_size(self.kv_memory)}"
        if self.number == self.facts.cache:
            return f"nothing: {self.number}, {self.why}{measured if not self.fits else ''}"
        why = self.why if self.number_fits else f"limited to {self.why}; {_wait(False)}"
        memory = _size(self.number * self.facts.width_bytes)
        return f"{settings.ENCODER_CACHE_TOKENS}={self.number}, {memory}: {why}{measured}"

    def _modalities(self, demand: encoder_sizing.Demand) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "largest": size,
                "items_per_prompt": demand.items[name],
                "limit": self.facts.limits[name],
                "assumed": name in demand.assumed,
                "fit": self.facts.cache // size,
                "fit_with_number": self.number // size,
            }
            for name, size in demand.sizes.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The report for a program; the keys are always the same, sizes in embeddings or bytes."""
        facts, demand = self.facts, self.demand
        return {
            "status": self.status,
            "model": facts.model,
            "nothing_to_size": facts.nothing or None,
            "modalities": self._modalities(demand) if demand else {},
            "slots": facts.slots,
            "max_model_len": facts.max_model_len,
            "demand_per_prompt": demand.per_prompt if demand else 0,
            "demand": demand.total if demand else 0,
            "compute_budget": facts.compute_budget,
            "cache": facts.cache,
            "cache_bytes": facts.cache * facts.width_bytes,
            "item_limit": facts.item_limit,
            "fits": self.fits,
            "embedding": {
                "hidden_size": facts.hidden_size,
                "deepstack_layers": facts.deepstack_layers,
                "dtype": facts.dtype,
                "bytes": facts.width_bytes,
            },
            "stock": {
                "at_risk": self.stock_at_risk,
                "states_cached": facts.states_cached,
                "block": facts.block,
                "look_ahead": facts.look_ahead,
            },
            "patched": {"at_risk": False, "waits": not self.fits},
            "set": {
                "variable": settings.ENCODER_CACHE_TOKENS,
                "number": self.number,
                "bytes": self.number * facts.width_bytes,
                "why": self.why,
                "fits": self.number_fits,
                "kv_memory": self.kv_memory,
            },
        }


def report(facts: Facts, kv_memory: int | None = None) -> Report:
    """Judge the facts; `kv_memory` in bytes goes before theirs. Without either only the rule of 2 GiB applies."""
    memory = kv_memory or facts.kv_memory
    demand = encoder_sizing.demand(facts.sizes, facts.limits, facts.slots, facts.max_model_len)
    if facts.nothing or demand is None:
        return Report(facts, None, kv_memory=memory)
    risk = encoder_sizing.at_risk(
        facts.cache, demand.total, states_cached=facts.states_cached, look_ahead=facts.look_ahead
    )
    number, why = encoder_sizing.automatic(demand.total, facts.cache, facts.width_bytes, memory or _PLENTY)
    return Report(facts, demand, risk, number, why, memory)


def facts_of(config: Any, budget: Any, *, started: bool = False) -> Facts:
    """The facts of upstream's VllmConfig and MultiModalBudget; `budget` is None for a model without such inputs.

    `started`: the engine has fixed the block size.
    """
    from vllm_ndt.encoder_engine import engine_of, states_cached

    model, cache, engine = config.model_config, config.cache_config, engine_of(config)
    sizes = {name: size for name, size in budget.mm_max_toks_per_item.items() if size > 0} if budget else {}
    nothing = ""
    if engine.encoder_decoder:
        nothing = ENCODER_DECODER
    elif not sizes:
        nothing = DISABLED if model.multimodal_config is not None else NO_INPUTS
    return Facts(
        model=str(model.model),
        max_model_len=model.max_model_len,
        slots=config.scheduler_config.max_num_seqs,
        sizes=sizes,
        limits={name: budget.mm_limits[name] for name in sizes},
        compute_budget=budget.encoder_compute_budget if budget else 0,
        cache=budget.encoder_cache_size if budget else 0,
        hidden_size=model.get_inputs_embeds_size(),
        deepstack_layers=encoder_sizing.deepstack_layers(model.hf_config),
        dtype=str(model.dtype).removeprefix("torch."),
        value_bytes=model.dtype.itemsize,
        states_cached=states_cached(config),
        block=engine.block if started else None,
        look_ahead=engine.look_ahead,
        kv_memory=cache.kv_cache_memory_bytes,
        nothing=nothing,
    )


def facts_from_flags(flags: Sequence[str]) -> Facts:
    """The facts for the arguments of `vllm serve`: a model, as --model or first, and any of its flags.

    Imports vllm, which takes some ten seconds, and reads the model's configuration and processors, never its weights.
    Nothing is written to stdout. Raises CannotTell.
    """
    with _silence(os.environ):
        try:
            config = _config(flags)
            from vllm_ndt.encoder_engine import budget_of

            return facts_of(config, budget_of(config))
        except (CannotTell, settings.SettingError) as error:
            raise CannotTell(str(error)) from None
        except ImportError as error:
            raise CannotTell(
                f"expected a vllm that can be imported, found: {_first_line(error)}; run vllm-ndt verify"
            ) from None
        except Exception as error:
            raise CannotTell(
                "expected a model and flags from which vllm serve would make its configuration, "
                f"found: {_first_line(error)}; correct them, or see vLLM's own lines with VLLM_LOGGING_LEVEL=INFO"
            ) from None


def memory_bytes(text: str) -> int:
    """The bytes of "24GiB", "512 MiB" or "25769803776"; raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    number = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if number < 1:
        raise ValueError(f"expected bytes or a number with KiB, MiB, GiB or TiB, like 24GiB, found {text!r}")
    return int(number)


def _config(flags: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:
        raise CannotTell(
            "expected a device of the kind that this vllm was built for, found none; run it where the engine will run"
        )
    parser = make_arg_parser(FlexibleArgumentParser())
    parser.error = _bad_flags
    parser.set_defaults(model=None)  # upstream's default is a model that nobody asked for
    options = parser.parse_args(list(flags))
    options.model = options.model_tag or options.model
    if not options.model:
        raise CannotTell("expected a model, found none; give --model with a folder or a name")
    if options.model.startswith(("/", "./", "../")) and not os.path.exists(options.model):
        raise CannotTell(f"expected a model's folder, found nothing at {options.model}; correct --model")
    # the defaults of --max-num-batched-tokens and --max-num-seqs depend on who asks
    return AsyncEngineArgs.from_cli_args(options).create_engine_config(UsageContext.OPENAI_API_SERVER)


def _bad_flags(message: str) -> NoReturn:
    raise CannotTell(f"expected arguments of vllm serve, found: {message}; see vllm serve --help=all")


@contextlib.contextmanager
def _silence(environ: Any) -> Iterator[None]:
    """Keep the lines of vLLM and what it imports, and of its child processes, off stdout.

    They are dropped unless the caller set VLLM_LOGGING_LEVEL: then they go to stderr.
    """
    asked = "VLLM_LOGGING_LEVEL" in environ
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    streams = [1] if asked else [1, 2]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(stream) for stream in streams]
    target = os.dup(2) if asked else os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in streams:
            os.dup2(target, stream)
        yield
    finally:
        for text in (sys.stdout, sys.stderr):
            text.flush()
        for stream, keep in zip(streams, kept, strict=True):
            os.dup2(keep, stream)
            os.close(keep)
        os.close(target)


def _items(facts: Facts, demand: encoder_sizing.Demand, number: int) -> list[str]:
    """A table of the modalities."""
    head = ["largest item", "embeddings", "items a prompt", "fit upstream's cache"]
    rows = [[name, str(size), str(demand.items[name]), str(facts.cache // size)] for name, size in demand.sizes.items()]
    if number > facts.cache:
        head.append(f"fit {number}")
        rows = [[*row, str(number // demand.sizes[row[0]])] for row in rows]
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (head, *rows)
    ]


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {text}" for name, text in rows]


def _causes(facts: Facts) -> list[str]:
    blocks = "block decided at start" if facts.block is None else f"block of {facts.block} tokens"
    states = [f"chunks end where states are cached ({blocks})"] if facts.states_cached else []
    return [*states, "a drafter looks ahead"] if facts.look_ahead else states


def _wait(fits: bool) -> str:
    return "the demand fits" if fits else "requests wait for each other: slower"


def _width(facts: Facts) -> str:
    layers = f" x (1 + {facts.deepstack_layers} deepstack layers)" if facts.deepstack_layers else ""
    return f"hidden size {facts.hidden_size}{layers}, {facts.dtype}"


def _size(count: int) -> str:
    """Bytes, and the same for a reader."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count} bytes ({count / unit:.1f} {name})"
    return f"{count} bytes"


def _first_line(error: Exception) -> str:
    """An error in one line: of pydantic's the message alone."""
    errors = getattr(error, "errors", None)
    with contextlib.suppress(Exception):
        if callable(errors):
            return str(errors()[0]["msg"]).removeprefix("Value error, ").rstrip(".")
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
