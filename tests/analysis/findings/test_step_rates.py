"""FLOPs, rates and MFU of steps that can be checked by hand, and the sentences about them."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
import pytest

import ringprof
from ringprof.analysis.findings.conditions import metrics_of
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.findings.step_rates import step_rates_of
from ringprof.analysis.timeline.window import Focus
from ringprof.errors import TraceFormatError
from ringprof.report.as_json import as_dict
from ringprof.report.sections import rates as rates_section
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import FLOPS_LIMIT
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.reduced import MAGIC, parse_reduced, reduce_trace
from tests.paths import DATA

RUNS = DATA.parents[1] / "traces"

BF16, HALF, FLOAT = "c10::BFloat16", "c10::Half", "float"
GEMM, FLASH = "nvjet_tst_128x256", "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"
ADD, NORM = "elementwise_kernel", "vectorized_layer_norm_kernel"
FLASH_BACKWARD = "flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128>>"
SDPA = "aten::_scaled_dot_product_flash_attention"

# 2 · 1000 · 1000 · 494.5 FLOPs in 1 µs are 989 TFLOP/s, the peak of an H200: in 2 µs half of it.
SQUARE, WIDTH = 1000, 989
PRODUCT = 2 * SQUARE * SQUARE * WIDTH


class Step:
    """Events of a trace; times in microseconds."""

    def __init__(self, device: str = "NVIDIA H200", rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device, rank, world
        self.events: list[dict[str, Any]] = []

    def operate(self, name, start, end, dims=None, *, dtype=BF16, values=(), thread=9, number=None):
        args = {} if dims is None else {"Input Dims": dims, "Input type": [dtype if dim else "" for dim in dims]}
        args |= {"Concrete Inputs": list(values)} if values else {}
        args |= {} if number is None else {"External id": number}
        self._add("cpu_op", name, start, end, thread, args)
        return self

    def run(self, name, start, end, *, launched=None, thread=9, stream=7, number=None):
        correlation = 1000 + len(self.events)
        args = {"device": 0, "stream": stream, "correlation": correlation}
        self._add("kernel", name, start, end, stream, args | ({} if number is None else {"External id": number}))
        if launched is not None:
            joined = {"correlation": correlation}
            self._add("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.5, thread, joined)
        return self

    def product(self, start, end, *, launched, dims=((SQUARE, SQUARE), (SQUARE, WIDTH)), **named):
        """A matrix product whose operator lasts a microsecond around its launch, and its kernel."""
        self.operate("aten::mm", launched - 0.25, launched + 0.75, dims and [list(dim) for dim in dims], **named)
        return self.run(GEMM, start, end, launched=launched)

    def mark(self, name, start, end):
        self._add("user_annotation", name, start, end, 9, {})
        return self

    def _add(self, category, name, start, end, thread, args):
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args})

    def trace(self):
        head: dict[str, Any] = {"deviceProperties": [{"id": 0, "name": self.device}] if self.device else []}
        head["distributedInfo"] = {"rank": self.rank, "world_size": self.world}
        return parse_trace(json.dumps({**head, "traceEvents": self.events}).encode(), f"rank{self.rank}.json")


def findings(*steps, focus=None):
    return findings_in_memory(attribute([step.trace() for step in steps], **({"focus": focus} if focus else {})))


def rates_of(*steps, focus=None):
    return step_rates_of(findings(*steps, focus=focus).attribution)


def attention_step(*, values=("", "", "", "0.", "True"), tokens=2048):
    """A causal attention of 70 µs, then a matrix product of 20 µs, an elementwise kernel of 10 µs."""
    shape = [1, 8, tokens, 128]
    step = Step().operate("aten::scaled_dot_product_attention", 1, 9).operate(SDPA, 2, 8, [shape] * 3, values=values)
    step.operate("aten::_flash_attention_forward", 3, 7, [[1, tokens, 8, 128]] * 3, values=("",) * 8 + values[4:])
    step.run(FLASH, 100, 170, launched=4)
    step.product(170, 190, launched=20)
    return step.run("elementwise_kernel", 190, 200, launched=30)


CAUSAL = 4 * 8 * 2048 * 2048 * 128 // 2


def test_the_rate_is_flops_over_the_kernels_time_and_the_mfu_flops_over_the_wall():
    """Half of the peak for 4 of 10 µs, a quarter of it for 4 more."""
    step = Step().product(100, 102, launched=1).product(102, 104, launched=2).product(104, 108, launched=3)
    step.run("elementwise_kernel", 108, 110, launched=4)
    rates = rates_of(step)
    assert rates.flops == 3 * PRODUCT
    (part,) = rates.parts
    assert (part.part, part.time_ns, part.coverage, part.mask_unknown) == ("matrix_products", 8000, 1.0, 0.0)
    assert part.share == pytest.approx(0.8)
    assert part.tflops == pytest.approx(3 * PRODUCT / 8e-6 / 1e12)
    assert (rates.peak_tflops, rates.peak_dtype) == (989.0, "bf16")
    assert rates.mfu == pytest.approx(3 * PRODUCT / 10e-6 / 989e12)


def test_nested_attention_operators_count_once():
    rates = rates_of(attention_step())
    assert {row.part: row.flops for row in rates.parts} == {"attention": CAUSAL, "matrix_products": PRODUCT}
    assert [row.part for row in rates.parts] == ["attention", "matrix_products"]
    assert [row.share for row in rates.parts] == [pytest.approx(0.7), pytest.approx(0.2)]
    assert rates.parts[0].tflops == pytest.approx(CAUSAL / 70e-6 / 1e12)


def test_overlapping_kernels_count_once_in_time():
    step = Step().product(100, 108, launched=1)
    step.operate("aten::mm", 2, 3, [[SQUARE, SQUARE], [SQUARE, WIDTH]]).run(GEMM, 104, 110, launched=2.5, stream=8)
    assert rates_of(step).parts[0].time_ns == 10_000
    assert rates_of(step).parts[0].tflops == pytest.approx(2 * PRODUCT / 10e-6 / 1e12)


def test_kernels_launched_outside_the_window_do_not_count():
    step = Step().product(100, 108, launched=1).product(200, 208, launched=50).mark("ProfilerStep#3", 40, 60)
    # Launched within, by an operator that began before: a window holds launches.
    step.operate("aten::mm", 39, 41, [[SQUARE, SQUARE], [SQUARE, WIDTH]]).run(GEMM, 210, 214, launched=40.5)
    rates = rates_of(step)
    assert (rates.flops, rates.parts[0].time_ns) == (2 * PRODUCT, 12_000)


def test_launch_on_another_thread_is_not_part_of_the_operator():
    step = Step().operate("aten::mm", 1, 5, [[SQUARE, SQUARE], [SQUARE, WIDTH]], thread=9)
    step.run(GEMM, 100, 108, launched=2, thread=10).product(108, 110, launched=20)
    rates = rates_of(step)
    assert (rates.flops, rates.coverage) == (PRODUCT, pytest.approx(0.2))


def test_kernels_without_a_launch_match_by_external_id():
    step = Step().operate("aten::mm", 1, 5, [[SQUARE, SQUARE], [SQUARE, WIDTH]], number=77)
    step.run(GEMM, 100, 108, number=77).run(GEMM, 108, 110, number=78)
    rates = rates_of(step)
    assert (rates.flops, rates.coverage) == (PRODUCT, pytest.approx(0.8))


def test_a_distributed_tensors_operator_counts_its_local_shard():
    """An operator of the same name encloses the local product, recorded with the global sizes."""
    step = Step().operate("aten::mm", 1, 9, [[8 * SQUARE, SQUARE], [SQUARE, WIDTH]])
    step.product(100, 108, launched=3)
    assert rates_of(step).flops == PRODUCT


def test_matrix_products_inside_an_attention_operator_are_attention():
    """The kernels of torch's fallback count as attention, too."""
    step = Step().operate("aten::_scaled_dot_product_attention_math", 0, 9)
    step.product(100, 104, launched=2).product(104, 108, launched=5)
    (part,) = rates_of(step).parts
    assert (part.part, part.flops, part.coverage) == ("attention", 2 * PRODUCT, 1.0)


def test_without_shapes_there_are_no_rates():
    step = Step().product(100, 108, launched=1, dims=None)
    assert rates_of(step) is None
    report = as_dict(findings(step), source="trace", paths=[])
    assert report["summary"]["step_rates"] is None
    assert "mfu" not in metrics_of(findings(step))


def test_a_part_of_an_iteration_has_no_rates():
    step = attention_step().mark("layer", 0, 10)
    assert rates_of(step, focus=Focus(window="layer")) is None
    assert rates_of(step, focus=Focus(between_ns=(0, 150_000))) is None


def test_missing_shapes_are_reported_and_suppress_the_mfu():
    step = Step().product(100, 108, launched=1).product(108, 110, launched=5, dims=None)
    rates = rates_of(step)
    assert (rates.mfu, rates.coverage) == (None, pytest.approx(0.8))
    # The rate is of the kernels whose FLOPs are known.
    assert rates.parts[0].tflops == pytest.approx(PRODUCT / 8e-6 / 1e12)
    assert findings(step).verdict[1] == (
        "What computes longest is matrix products 100.0 % (247 TFLOP/s) of the time; shapes are recorded for 80.0 % of "
        "the matrix-product time, and rates are of that time."
    )


def test_mfu_needs_shapes_for_99_percent_of_the_time():
    most = Step().product(100, 199, launched=1).product(199, 200, launched=5, dims=None)
    assert rates_of(most).mfu == pytest.approx(PRODUCT / 100e-6 / 989e12)
    less = Step().product(100, 198, launched=1).product(198, 200, launched=5, dims=None)
    assert rates_of(less).mfu is None


def test_unrecorded_mask_gives_an_upper_bound_and_no_mfu():
    step = attention_step(values=("",) * 5)
    rates = rates_of(step)
    assert rates.part("attention").flops == 2 * CAUSAL
    assert (rates.part("attention").mask_unknown, rates.mfu) == (1.0, None)
    assert "(245 TFLOP/s at most: attention masks are not recorded)" in findings(step).verdict[1]


def test_the_peak_is_that_of_the_data_type_with_most_flops():
    step = Step().product(100, 108, launched=1).product(108, 116, launched=3).product(116, 124, launched=5, dtype=FLOAT)
    rates = rates_of(step)
    assert rates.peak_dtype == "bf16"
    assert rates.other_dtypes == {"fp32": pytest.approx(1 / 3)}
    assert rates.mfu == pytest.approx(3 * PRODUCT / 24e-6 / 989e12)
    only = rates_of(Step().product(100, 108, launched=1, dtype=FLOAT))
    assert (only.mfu, only.peak_tflops, only.flops) == (None, None, PRODUCT)


@pytest.mark.parametrize("device", ["NVIDIA Unheard-of 9000", "NVIDIA L4"])
def test_no_mfu_if_the_peak_is_unknown_or_exceeded(device):
    """247 TFLOP/s are more than an L4 has."""
    rates = rates_of(Step(device).product(100, 108, launched=1))
    assert rates.mfu is None
    assert rates.parts[0].tflops == pytest.approx(PRODUCT / 8e-6 / 1e12)


def test_a_rank_without_shapes_counts_as_time_without_flops():
    """One of two ranks has recorded shapes: half of the time is covered."""
    steps = [Step(rank=0, world=2).product(100, 108, launched=1)]
    steps.append(Step(rank=1, world=2).product(100, 108, launched=1, dims=None))
    rates = rates_of(*steps)
    assert (rates.coverage, rates.mfu, rates.flops) == (pytest.approx(0.5), None, PRODUCT // 2)


def test_ranks_flops_are_averaged_and_the_slowest_sets_the_mfu():
    steps = [Step(rank=0, world=2).product(100, 108, launched=1)]
    steps.append(Step(rank=1, world=2).product(100, 108, launched=1).product(108, 116, launched=5))
    rates = rates_of(*steps)
    assert rates.flops == 3 * PRODUCT // 2
    assert rates.mfu == pytest.approx(1.5 * PRODUCT / 16e-6 / 989e12)


def test_gpu_run_without_device_activity_has_no_rates():
    """A GPU's run whose device activities are missing has no rates."""
    dims = [[SQUARE, SQUARE], [SQUARE, WIDTH]]
    assert rates_of(Step().operate("aten::mm", 1, 5, dims)) is None
    (part,) = rates_of(Step(device="").operate("aten::mm", 1, 5, dims)).parts
    assert part.tflops == pytest.approx(PRODUCT / 4e-6 / 1e12)


def test_a_real_ring_step_computes_the_causal_attention_of_its_share():
    """Zigzag over 8 H200: 131072 tokens, 40 heads of 128, forward and 2.5 times that backward, half of all pairs."""
    (rank,) = attribute([read_trace(DATA / "h200x8-zigzag-131072" / "rank0.json.gz")]).ranks
    attention, products = rank.part_work
    assert attention.flops == 4 * 40 * 128 * 131072**2 // 2 * 7 // 2 // 8
    assert attention.flops_by_dtype == {"bf16": attention.flops}
    assert attention.time_ns == attention.covered_ns == rank.breakdown.flash_ns
    assert (products.flops, products.time_ns, attention.dense_flops) == (0, 0, 0)


# --- in words -----------------------------------------------------------------------------------------


ADAM = "multi_tensor_apply_kernel<FusedAdamMathFunctor>"
SHAPE = [1, 8, 2048, 128]
SAID = [
    (
        attention_step(),
        "70.0 % of the time is attention (123 TFLOP/s), 20.0 % is matrix products (98.9 TFLOP/s); "
        "MFU 10.7 % of 989 TFLOP/s (bf16).",
    ),
    (
        Step().run(FLASH, 100, 170, launched=4).run(GEMM, 170, 190, launched=20).run(ADD, 190, 200, launched=30),
        "70.0 % of the time is attention, 20.0 % is matrix products.",
    ),
    # Forward and backward are one part; neither alone takes longer than the products: 24 + 16 against 30.
    (
        Step().run(FLASH, 100, 124, launched=1).run(FLASH_BACKWARD, 124, 140, launched=2)
        .run(GEMM, 140, 170, launched=3).run(ADD, 170, 190, launched=4)
        .run(ADAM, 190, 200, launched=5).run(NORM, 200, 220, launched=6),
        "What computes longest is attention 33.3 %, then matrix products 25.0 % of the time.",
    ),
    # A part with a rate is named beside longer ones.
    (
        Step().run(ADD, 100, 150, launched=1).run(NORM, 150, 190, launched=2).product(190, 200, launched=10),
        "What computes longest is elementwise 50.0 %, then norm 40.0 % of the time; matrix products 10.0 % "
        "(198 TFLOP/s); MFU 2.0 % of 989 TFLOP/s (bf16).",
    ),
    # The gather is the largest loss, with 55 of 100 us alone, and computes longest: it has one number.
    (
        Step().run("vectorized_gather_kernel", 100, 160, launched=1).run(GEMM, 155, 190, launched=2)
        .run(ADD, 190, 200, launched=3),
        "What computes longest is permute and gather 60.0 %, then matrix products 35.0 % of the time.",
    ),
    (
        Step().operate(SDPA, 2, 8, [SHAPE] * 3, values=("", "", "", "0.", "True")).run(FLASH, 100, 170, launched=4),
        "No loss outside the attention kernels reaches 2 %: 100.0 % of the time is attention kernels (123 TFLOP/s); "
        "MFU 12.4 % of 989 TFLOP/s (bf16).",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("step", "said"), SAID)
def test_verdict_names_what_computes(step, said):
    assert findings(step).verdict[1] == said


def test_verdict_of_a_recorded_layer_names_attention_first():
    """Kernels of attention, one after the other, are 117.8 of 180.1 ms, by the report's own table."""
    folder = RUNS / "h200x2-zigzag-65536-layer"
    run = ringprof.load(folder / "run.json")
    flash = sum(row.time_ns for row in run.findings.summary.kinds if row.kind.startswith("flash"))
    share = 100 * flash / run.findings.summary.parts[-1].mean_ns
    assert share == pytest.approx(65.4, abs=0.05)
    assert run.verdict[1] == f"{share:.1f} % of the time is attention, 26.0 % is matrix products."


def test_the_report_has_rates_in_text_json_and_conditions():
    step_findings = findings(attention_step())
    (block,) = rates_section.terminal(step_findings, TextStyle(width=200), Listing())
    assert block.split("\n") == [
        "10.6 GFLOP per GPU by recorded shapes, recomputed work included: attention at 123 TFLOP/s, 12.4 % of peak, "
        "matrix products at 98.9 TFLOP/s, 10.0 % of peak",
        "MFU 10.7 % of 989 TFLOP/s (H200, dense bf16, vendor's figure)",
    ]
    plain = as_dict(step_findings, source="trace", paths=[])["summary"]["step_rates"]
    assert plain["flops"] == CAUSAL + PRODUCT
    assert plain["mfu"] == pytest.approx((CAUSAL + PRODUCT) / 100e-6 / 989e12)
    assert [part["flops"] for part in plain["parts"]] == [CAUSAL, PRODUCT]
    metrics = measurement_of_run("a", step_findings).values()
    assert metrics["mfu"] == metrics_of(step_findings)["mfu"] == plain["mfu"]
    assert metrics["attention_tflops"] == pytest.approx(CAUSAL / 70e-6 / 1e12)
    assert metrics["matrix_products_tflops"] == pytest.approx(PRODUCT / 20e-6 / 1e12)


# --- reduced traces ------------------------------------------------------------------------------------


def test_a_reduced_trace_has_the_same_rates():
    trace = attention_step().trace()
    reduced = parse_reduced(reduce_trace(trace))
    assert len(reduced.flop_records.start_ns) == 3
    assert step_rates_of(attribute([reduced])) == step_rates_of(attribute([trace]))


def test_reduced_trace_without_shapes_stores_no_shape_table():
    trace = Step().product(100, 108, launched=1, dims=None).trace()
    assert b"flop_records" not in zlib.decompress(reduce_trace(trace).removeprefix(MAGIC))


@pytest.mark.parametrize(
    ("column", "value"), [("flops", -1), ("flops", FLOPS_LIMIT + 1), ("dtype", 99), ("causal", 2), ("name", 10_000)]
)
def test_a_damaged_reduced_trace_is_refused(column, value):
    trace = attention_step().trace()
    values = getattr(trace.flop_records, column).copy()
    values[0] = value
    records = msgspec.structs.replace(trace.flop_records, **{column: values})
    with pytest.raises(TraceFormatError, match="damaged"):
        parse_reduced(reduce_trace(msgspec.structs.replace(trace, flop_records=records)))
