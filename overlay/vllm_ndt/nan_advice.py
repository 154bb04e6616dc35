# SPDX-License-Identifier: Apache-2.0
"""What the runs of `vllm-ndt nan-check` found, and what that makes likely: a table of symptoms, causes and remedies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ndt import settings

# where a finding comes from: its first bad layer's attention, what lies before it, before the first of all, the
# encoder, a norm, or what follows the last attention layer
KERNEL, INPUTS, EMBEDDINGS, ENCODER, NORM, LOGITS = "kernel", "inputs", "embeddings", "encoder", "norm", "logits"
# runs by name; AGAIN is BASELINE once more, the others differ in the one thing that they are named after
BASELINE, AGAIN, GRAPHS, PLAIN, FLOAT32, REFERENCE = "baseline", "again", "graphs", "plain", "float32", "reference"
PLAIN_BACKEND = "TRITON_ATTN"
FLOAT16_MAX = 65_504.0
BLOCK = 16  # prompts of a multiple of this are the controls: kernels that go by tiles have no tail there
HUGE = 10.0  # times the magnitude that plain attention gives


@dataclass(frozen=True)
class Finding:
    """The first thing that the guard found for a prompt.

    `layer` is the first bad layer ("" if only logits are bad), `first` whether it is the model's first attention
    layer, `tensors` the kinds (as in "NaN, Inf") by bad tensor, `row` the first bad row in its step, `token` 0 in the
    prompt itself and n with the n-th generated token as input, `origin` one of the words above, `text` the guard's own.
    `norm`: whether the layer is a norm; `after`: where norms are watched, the clean one of all layers that ran last.
    """

    layer: str
    first: bool
    tensors: Mapping[str, str]
    row: int
    token: int
    origin: str
    text: str
    norm: bool = False
    after: str = ""


@dataclass(frozen=True)
class Case:
    """A prompt in a batch of `batch` prompts, `tokens` long, and what came of it.

    `logits`: kinds found in its logits in any step, "" for none; `output`: the token ids; `bad_logprobs`: how many of
    their logprobs are NaN.
    """

    name: str
    batch: int
    tokens: int
    image: bool
    finding: Finding | None
    logits: str
    output: tuple[int, ...]
    bad_logprobs: int

    @property
    def notes(self) -> list[str]:
        """What is odd about the answer, and proves nothing by itself."""
        found = [f"{self.bad_logprobs} of {len(self.output)} logprobs are NaN"] if self.bad_logprobs else []
        if len(self.output) > 1 and len(set(self.output)) == 1:
            found.append(f"token {self.output[0]} in all {len(self.output)} positions")
        return found


@dataclass(frozen=True)
class Run:
    """What one engine gave. `peaks`: the largest finite magnitude of each layer; `device`: "cuda", "cpu" and so on.

    `own_dtype`: what the model's config says, or ""; `injected`: the fault that was put in, or `not_injected`: why
    none was; both "" where none was asked for, or its step never came.
    """

    device: str
    dtype: str
    backends: tuple[str, ...]
    quantization: str
    layers: tuple[str, ...]
    peaks: Mapping[str, float]
    cases: tuple[Case, ...]
    untested: tuple[str, ...] = field(default=())
    own_dtype: str = ""
    injected: str = ""
    not_injected: str = ""

    @property
    def hits(self) -> list[Case]:
        """The cases in which something was found."""
        return [case for case in self.cases if case.finding]

    @property
    def bad(self) -> bool:
        """Whether there is a case of which anything was non-finite, if only its logprobs."""
        return any(case.finding or case.bad_logprobs for case in self.cases)


@dataclass(frozen=True)
class Advice:
    """A row of the table: what was seen, what is likely, what to do."""

    symptom: str
    likely: str
    do: str


def run_from(found: Mapping[str, Any]) -> Run:
    """A run as JSON (dataclasses.asdict of a Run) made a Run again."""
    cases = []
    for case in found["cases"]:
        finding = Finding(**case["finding"]) if case["finding"] else None
        cases.append(Case(**{**case, "finding": finding, "output": tuple(case["output"])}))
    parts = {name: tuple(found[name]) for name in ("backends", "layers", "untested")}
    return Run(**{**found, **parts, "cases": tuple(cases)})


def advise(runs: Mapping[str, Run]) -> list[Advice]:
    """The rows that apply to runs, by name; of several that do, the surer ones first. Needs the run BASELINE."""
    base = runs[BASELINE]
    return [*_compared(base, runs), *_alone(base, runs), *_magnitudes(base, runs)]


def differing(one: Run, other: Run) -> list[Case]:
    """The cases of `one` that have other tokens, or another first finding, in `other`."""
    pairs = {(case.name, case.batch): case for case in other.cases}
    return [case for case in one.cases if _outcome(case) != _outcome(pairs.get((case.name, case.batch)))]


def _outcome(case: Case | None) -> Any:
    if case is None:
        return None
    finding = case.finding
    return case.output, finding and (finding.layer, sorted(finding.tensors), finding.token)


def _compared(base: Run, runs: Mapping[str, Run]) -> Iterable[Advice]:
    """What the runs say that differ in one thing."""
    bad = bool(base.hits)
    again, graphs, plain, single, reference = (runs.get(n) for n in (AGAIN, GRAPHS, PLAIN, FLOAT32, REFERENCE))
    if again and (other := differing(base, again)):
        yield Advice(
            f"the same run gave another answer ({_names(other)})",
            "a race: a kernel reads what it, or another one, has not finished writing",
            "update the attention kernel (flash-attention-v100) or vLLM; until then plain attention; see also "
            "whether a run with plain attention repeats",
        )
    if graphs and (new := _only_in(graphs, base)):
        yield Advice(
            f"only with CUDA graphs ({_names(new)})",
            "CUDA graphs, a known problem on V100",
            "keep --enforce-eager",
        )
    if bad and plain and not plain.hits:
        yield Advice(
            "gone with plain attention",
            f"the attention kernel ({', '.join(base.backends) or 'unknown'})",
            f"serve with --attention-backend {PLAIN_BACKEND}: 20-30 % slower, stable; or update the kernel",
        )
    if bad and plain and plain.hits:
        yield Advice(
            "stays with plain attention",
            "not the attention kernel: weights, their quantisation kernels, or the dtype",
            "go by the float32 run, and by one with --reference-model",
        )
    if bad and reference and not reference.hits:
        yield Advice(
            "gone without quantisation",
            f"the quantised weights or their kernels ({base.quantization or 'no quantisation named'})",
            "use another quantisation kernel (AWQ on sm_70: VLLM_USE_TRITON_AWQ=1), or other weights",
        )
    if bad and reference and reference.hits:
        if _kernel(reference):
            if not (plain and plain.hits):
                yield Advice(
                    "stays without quantisation",
                    "the attention kernel",
                    f"serve with --attention-backend {PLAIN_BACKEND}: 20-30 % slower, stable",
                )
        elif not (single and single.hits) and not _kernel_cures(runs):
            yield Advice(
                "stays without quantisation, and came before the attention kernel",
                "the model itself in this dtype, not its quantisation and not the attention kernel",
                "serve in bfloat16 where the GPU has it, else in float32",
            )
    if bad and single and not single.hits and base.dtype != "float32":
        # float32 goes through another attention kernel, which may be what cures it
        sure = bool(plain.hits) if plain else all(_origin(case) != KERNEL for case in base.hits)
        yield Advice(
            "gone in float32",
            f"precision: {base.dtype} overflows" + ("" if sure else "; or the attention kernel, which float32 changes"),
            "serve in bfloat16 where the GPU has it; float32 is slow, and only confirms it",
        )
    if bad and single and single.hits:
        files = "look for NaN and Inf in the weights' files (docs/nan.md has how)"
        if reference and reference.hits:
            symptom, likely = "stays in float32 and without quantisation", "neither precision nor quantisation"
        else:
            symptom, likely = "stays in float32", "not precision"
            files += "; go by the runs with plain attention and with --reference-model"
        yield Advice(symptom, f"{likely}: damaged weights, or a fault in a kernel", files)


def _alone(base: Run, runs: Mapping[str, Run]) -> Iterable[Advice]:
    """What the baseline says by itself."""
    plain = runs.get(PLAIN)
    precision = _precision(runs)
    yield from _own_dtype(base, runs)
    text = [case for case in base.hits if _origin(case) != ENCODER]
    encoder = [case for case in base.hits if _origin(case) == ENCODER]
    if encoder:
        yield Advice(
            f"non-finite before the first attention layer, from the encoder ({_names(encoder)})",
            f"the vision tower{f' overflows in {base.dtype}' if precision else ''}; the attention kernels are innocent",
            ("serve in bfloat16 where the GPU has it, else in float32" if precision else _compare(runs))
            + "; text alone is not affected",
        )
    kernel = [case for case in text if _origin(case) == KERNEL]
    first = [case for case in kernel if case.finding and case.finding.first]
    instead = f"plain attention (--attention-backend {PLAIN_BACKEND}): 20-30 % slower, stable"
    if first and not (plain and plain.hits):
        yield Advice(
            f"in the first attention layer, whose inputs are clean ({_names(first)})",
            "the custom attention kernel, against quantisation",
            f"update flash-attention-v100 or vLLM; else {instead}",
        )
    if kernel and not first and not (plain and plain.hits):
        yield Advice(
            f"in the attention of a later layer, whose inputs are clean ({_names(kernel)})",
            "its attention kernel, or what its KV cache holds",
            f"update flash-attention-v100 or vLLM; else {instead}",
        )
    yield from _inputs(text, runs)
    yield from _lengths(base, text, runs)
    logits = [case for case in text if _origin(case) == LOGITS]
    if logits:
        yield Advice(
            f"in the logits, and in no attention layer ({_names(logits)})",
            "what follows the last attention: its output projection, MLP, final norm or LM head",
            _compare(runs),
        )
    sampled = [case for case in base.cases if case.bad_logprobs and not case.finding and not case.logits]
    if sampled:
        yield Advice(
            f"NaN in the answer, but in no activation and no logits ({_names(sampled)})",
            "sampling",
            "use temperature 0 and top_p 1; this check did, so also try VLLM_USE_FLASHINFER_SAMPLER=0",
        )


def _inputs(text: list[Case], runs: Mapping[str, Run]) -> Iterable[Advice]:
    """What findings say that came before a layer's attention, or in a norm."""
    weights = "that overflows, or quantised weights" if _precision(runs) else "with damaged or quantised weights"
    innocent = "" if _kernel_cures(runs) else "; not the attention kernel"
    embedded = [case for case in text if _origin(case) == EMBEDDINGS]
    if embedded and all(case.finding and case.finding.norm for case in embedded):
        yield Advice(
            f"the first norm's input is already bad ({_names(embedded)})",
            f"the embeddings, or their weights{innocent}",
            _compare(runs),
        )
    elif embedded:
        yield Advice(
            f"the first attention layer's inputs are already bad ({_names(embedded)})",
            "it came before this layer's attention: embeddings, first norm or projections, or their quantised weights",
            _compare(runs),
        )
    norms = [case for case in text if _origin(case) == NORM]
    if norms:
        yield Advice(
            f"in a norm whose input is clean: {_layers(norms)} ({_names(norms)})",
            f"this norm, {weights}{innocent}",
            _compare(runs),
        )
    later = [case for case in text if _origin(case) == INPUTS]
    alone = [case for case in later if case.finding and not case.finding.after]
    if alone:
        yield Advice(
            f"the input is already bad, it came before the attention of {_layers(alone)} ({_names(alone)})",
            "its projections or norm, or what lies between it and the attention layer before, such as an MLP "
            f"{weights}{innocent}",
            f"{_compare(runs)}; {settings.NAN_GUARD_LAYERS}=attention,norm narrows it down",
        )
    between: dict[str, list[Case]] = {}
    for case in later:
        if case.finding and case.finding.after:
            between.setdefault(f"between {case.finding.after} and {case.finding.layer}", []).append(case)
    for place, cases in between.items():
        yield Advice(
            f"the input is already bad, it came {place} ({_names(cases)})",
            f"what lies between these two, an MLP or a projection {weights}{innocent}",
            _compare(runs),
        )


def _own_dtype(base: Run, runs: Mapping[str, Run]) -> Iterable[Advice]:
    """A model made for bfloat16 has values that float16 does not hold."""
    if base.bad and base.dtype == "float16" and base.own_dtype == "bfloat16":
        yield Advice(
            "in float16, and the model's own dtype is bfloat16",
            "values beyond float16's range, which bfloat16 holds"
            if _precision(runs)
            else "not the dtype alone: it stays in float32",
            "repeat the check with --dtype bfloat16, and serve so where the GPU has it (V100 does not)",
        )


def _lengths(base: Run, hits: list[Case], runs: Mapping[str, Run]) -> Iterable[Advice]:
    """What the lengths of the prompts that were hit alone say."""
    found = {(case.name, case.batch) for case in hits}
    alone = [case for case in base.cases if case.batch == 1 and not case.image]
    bad = [case for case in alone if (case.name, case.batch) in found]
    clean = [case for case in alone if not case.finding]
    plain = runs.get(PLAIN)
    kernel = all(_origin(case) == KERNEL for case in bad) and not (plain and plain.hits)
    # while decoding every length passes the multiples
    tails = [case for case in bad if case.finding and not case.finding.token]
    whole = [case for case in alone if case.tokens % BLOCK == 0 and case not in tails]
    if kernel and tails and len(whole) > 1 and all(case.tokens % BLOCK for case in tails):
        yield Advice(
            f"on prompts whose length is no multiple of {BLOCK} ({_names(tails)}); those of a multiple are clean",
            "the attention kernel, which goes wrong in the last, part-filled tile",
            "update it, or serve with plain attention; its wrong values are often finite, so do not trust the rest",
        )
    if not bad or not clean:
        return
    single = runs.get(FLOAT32)
    fault = "an overflow" if _precision(runs) else "damaged weights, or a kernel's fault,"
    lengths, sound = [case.tokens for case in bad], [case.tokens for case in clean]
    if max(lengths) < min(sound):
        if kernel:
            likely, do = "the attention kernel, with few keys", "update it, or serve with plain attention"
        elif any(_origin(case) == LOGITS for case in bad):
            likely = f"{fault} in the first positions, after the last attention layer"
            do = _compare(runs)
        else:
            likely = f"{fault} in the first positions, in an MLP, norm or projection"
            likely += "" if _kernel_cures(runs) else "; not the attention kernel"
            do = ("serve in bfloat16 where the GPU has it; " if _precision(runs) else "") + _compare(runs)
        yield Advice(f"on short prompts only (up to {max(lengths)} tokens, clean from {min(sound)})", likely, do)
    if min(lengths) > max(sound):
        likely, do = f"{base.dtype} is not stable", "float32 once, to confirm (--matrix; slow): if it goes, precision"
        if single is not None:
            likely = "not precision: float32 has it, too" if single.hits else f"{likely}, confirmed by float32"
            do = "see what is said of float32"
        yield Advice(f"on long prompts only (from {min(lengths)} tokens, clean up to {max(sound)})", likely, do)


def _magnitudes(base: Run, runs: Mapping[str, Run]) -> Iterable[Advice]:
    """What the largest finite magnitudes say."""
    plain = runs.get(PLAIN)
    if plain:
        far = [name for name, peak in base.peaks.items() if 0 < HUGE * plain.peaks.get(name, 0.0) < peak]
        if far:
            yield Advice(
                f"finite values more than {HUGE:.0f} times as large as with plain attention ({far[0]} first)",
                "the attention kernel gives wrong finite values",
                f"serve with --attention-backend {PLAIN_BACKEND}, or update the kernel",
            )
    if base.dtype == "float16":
        near = [name for name, peak in base.peaks.items() if peak > FLOAT16_MAX / 2]
        if near:
            yield Advice(
                f"values of {base.peaks[near[0]]:.3g} in {near[0]}, near float16's largest, {FLOAT16_MAX:.0f}",
                "an overflow that builds up",
                "serve in bfloat16 where the GPU has it; other prompts may overflow",
            )


def _precision(runs: Mapping[str, Run]) -> bool:
    """Whether precision may be the cause, which it is not where float32 has it, too."""
    single = runs.get(FLOAT32)
    return not (single and single.hits)


def _kernel_cures(runs: Mapping[str, Run]) -> bool:
    """Whether plain attention makes it go; the other kernel may have spoiled a later layer by finite values."""
    plain = runs.get(PLAIN)
    return bool(plain and not plain.hits)


def _layers(cases: list[Case]) -> str:
    return ", ".join(dict.fromkeys(case.finding.layer for case in cases if case.finding))


def _compare(runs: Mapping[str, Run]) -> str:
    if FLOAT32 in runs:
        return "go by what is said here of float32; compare with unquantised weights (--reference-model)"
    return "compare with float32 (--matrix) and with unquantised weights (--reference-model)"


def _origin(case: Case) -> str:
    return case.finding.origin if case.finding else ""


def _kernel(run: Run) -> bool:
    return all(_origin(case) == KERNEL for case in run.hits)


def _only_in(run: Run, other: Run) -> list[Case]:
    known = {(case.name, case.batch) for case in other.hits}
    return [case for case in run.hits if (case.name, case.batch) not in known]


def _names(cases: list[Case]) -> str:
    """Up to three of the cases, and how many more."""
    names = list(dict.fromkeys(case.name for case in cases))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
