# SPDX-License-Identifier: Apache-2.0
"""Where a decode step goes: classes of kernels, which steps are recorded, and the table by hand.

Real engines are recorded in `tests/e2e/test_bench_rollout.py`.
"""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import rollout_steps, rollout_steps_figure
from benchmarks.rollout import Report, Result, RolloutConfig
from benchmarks.rollout_engine import Answer, Timing
from benchmarks.rollout_kernels import class_of, regrouped
from benchmarks.rollout_profile import StepRecorder
from benchmarks.rollout_report import Prediction
from flashrl_verl.settings import Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.plan.schedule import Work


@pytest.mark.parametrize(
    "kernel, expected",
    # Names of the sources of vLLM 0.24, FlashAttention 3, FlashInfer, NCCL and ATen; template arguments are left out.
    [
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", "linear layers"),
        (
            "void cutlass::device_kernel<vllm::enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<...> > >",
            "linear layers",
        ),
        ("fused_moe_kernel", "experts"),
        ("void vllm::moe::topkGating<8, 128, 4, 16, 32, int>(...)", "experts"),
        ("void vllm::moe::count_and_sort_expert_tokens_kernel<int>(...)", "experts"),
        ("void vllm::moe_sum_kernel<c10::BFloat16, 8>(...)", "experts"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)", "communication"),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "communication"),
        ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(...)", "norms, rope, activation"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<...>", "sampling"),
        ("_reshape_cache_per_token_head", "KV write"),
        ("write_kv_cache_kernel", "KV write"),
        ("read_kv_cache_kernel", "attention"),
        ("int8_attention_kernel", "attention"),
        ("int8_attention_merge_kernel", "attention"),
        ("reshape_and_cache_kernel_flash", "KV write"),
        ("void at::native::vectorized_gather_kernel<16, long>(...)", "other"),
        ("_gather_block_tables_kernel", "other"),
        ("_temperature_kernel", "sampling"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...> > >", "attention"),
        ("void flash::prepare_varlen_num_blocks_kernel<...>(int)", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(...)", "KV write"),
        ("void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16, float>(...)", "activation quantization"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<...>", "activation quantization"),
        ("_per_token_group_quant_fp8", "activation quantization"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(...)", "norms, rope, activation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, rope, activation"),
        ("triton_poi_fused_dynamic_scaled_int8_quant_mul_silu_slice_1", "norms, rope, activation"),
        ("triton_red_fused__to_copy_abs_amax_clamp_cutlass_scaled_mm_div", "norms, rope, activation"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(...)", "norms, rope, activation"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(...)", "sampling"),
        ("void at::native::radixSortKVInPlace<...>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("aten::addmm", "linear layers"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >", "other"),
    ],
)
def test_a_kernels_class_is_that_of_what_it_does(kernel, expected):
    assert class_of(kernel) == expected


def test_a_recorded_profile_gets_inductors_kernels_in_their_class():
    quantizing, products, between = "activation quantization", "linear layers", "norms, rope, activation"
    kernels = [
        [quantizing, "void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16, float>(...)", 2.0, 4.0],
        [quantizing, "triton_poi_fused_dynamic_scaled_int8_quant_mul_silu_slice_1", 1.0, 3.0],
        [products, "a name cut before what told its class", 5.0, 1.0],
        [products, "triton_red_fused_cutlass_scaled_mm_0", 0.5, 1.0],
    ]
    sums = {quantizing: 3.0, products: 5.5, between: 0.25}
    grouped = regrouped({"steps": 8, "kernels": kernels, "milliseconds": sums, "launches": dict.fromkeys(sums, 9.0)})
    assert grouped["milliseconds"] == {quantizing: 2.0, products: 5.0, between: 1.75}
    assert grouped["launches"] == {quantizing: 6.0, products: 8.0, between: 13.0}
    assert [kind for kind, *_ in grouped["kernels"]] == [quantizing, between, products, between] and grouped[
        "steps"
    ] == 8
    assert regrouped(grouped) == grouped and kernels[1][0] == quantizing


class Worker:
    """What the recorder asks of a worker; a step is a product for each sequence."""

    def __init__(self):
        self.model_runner = SimpleNamespace(model=torch.nn.Linear(4, 4))
        self.executed = 0

    def execute_model(self, scheduled):
        self.executed += 1
        for _ in scheduled.num_scheduled_tokens:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        return "output"


def step(*tokens: int, context: int = 0, new: int = 0):
    """A scheduled step; the last ``new`` sequences are new requests."""
    return SimpleNamespace(
        num_scheduled_tokens={str(i): count for i, count in enumerate(tokens)},
        total_num_scheduled_tokens=sum(tokens),
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[context] * (len(tokens) - new)),
    )


def test_steps_in_which_every_sequence_gets_a_token_are_recorded_after_those_that_are_skipped():
    worker = Worker()
    recorder = StepRecorder(worker, sequences=3, skip=2, steps=4)
    for scheduled in (step(16, 16), step(16, 1, 1), step(3), step(1, 1)):  # prompts, and fewer sequences, do not count
        assert worker.execute_model(scheduled) == "output"
    for context in range(10, 20):
        worker.execute_model(step(1, 1, 1, context=context))
    assert worker.executed == 14 and "execute_model" not in vars(worker)
    result = recorder.result
    assert (result.steps, result.sequences, result.context) == (4, 3, pytest.approx(12 + 1.5))
    assert result.launches["linear layers"] == pytest.approx(3) and result.milliseconds["linear layers"] > 0
    assert ("linear layers", "aten::mm", result.milliseconds["linear layers"], 3.0) in result.kernels


def test_of_a_kernels_name_the_first_160_characters_are_kept_behind_the_choice_of_its_class():
    class Named(Worker):
        def execute_model(self, scheduled):
            with torch.profiler.record_function("x" * 170 + "gemm"):  # what is cut tells the class
                return torch.ones(64, 64).cos()

    worker = Named()
    recorder = StepRecorder(worker, sequences=1, skip=0, steps=1)
    worker.execute_model(step(1))
    worker.execute_model(step(1))
    found = {kernel: kind for kind, kernel, *_ in recorder.result.kernels}
    assert found["x" * 160] == "linear layers" and max(map(len, found)) == 160


def test_a_rollout_that_ends_early_is_a_profile_of_what_there_was():
    worker = Worker()
    recorder = StepRecorder(worker, sequences=2, skip=0, steps=9)
    for scheduled in (step(1, 1, context=5), step(1, 1, context=6), step(1)):
        worker.execute_model(scheduled)
    assert "execute_model" not in vars(worker)
    assert (recorder.result.steps, recorder.result.context) == (2, pytest.approx(5.5))


def test_a_rollout_without_such_a_step_says_why_there_is_no_profile():
    worker = Worker()
    recorder = StepRecorder(worker, sequences=2, skip=3, steps=1)
    worker.execute_model(step(1))
    worker.execute_model(step(1, 1))
    recorder.stop()
    assert recorder.result is None and "execute_model" not in vars(worker)
    assert "all 2 sequences were decoded together in 1 steps, and 4 are needed" in recorder.reason


def test_prompts_of_one_token_are_no_decode_step():
    worker = Worker()
    recorder = StepRecorder(worker, sequences=2, skip=0, steps=1)
    worker.execute_model(step(1, 1, new=2))
    worker.execute_model(step(1, 1, new=1))
    assert recorder.result is None
    worker.execute_model(step(1, 1))
    worker.execute_model(step(1, 1))
    assert recorder.result.steps == 1 and recorder.reason is None


def test_a_profile_without_kernels_is_none():
    class Idle(Worker):
        def execute_model(self, scheduled):
            return "output"

    worker = Idle()
    recorder = StepRecorder(worker, sequences=1, skip=0, steps=1)
    worker.execute_model(step(1))
    recorder.stop()
    assert recorder.result is None and "the profiler saw no kernel" in recorder.reason


def recorded(folder, parts, **timing) -> tuple[RolloutConfig, Report]:
    """One arm at one work: 10 sequences of 125 tokens, whose steps have these milliseconds by class."""
    arm, work = Arm(precision=Precision.BF16), Work(sequences=10, prompt=100, response=51)
    config = RolloutConfig(
        model="qwen2.5-7b", arms=(arm,), works=(work,), rounds=1, repeats=1, gpu_memory_utilization=0.9,
        tensor_parallel=1,
        max_num_seqs=64, max_num_batched_tokens=512, layers=None, seed=0, output=folder,
    )  # fmt: skip
    profile = {"steps": 8, "sequences": 10, "context": 125.0, "milliseconds": parts, "launches": {}, "kernels": []}
    timings = [
        Timing(**{"work": [10, 100, 51], "seconds": [1.1], "prefill_seconds": [0.1], "profile": profile} | timing)
    ]
    answer = Answer(layers={}, memory={}, weights={}, device={}, timings=timings)
    environment = {"device": "NVIDIA H200", "memory_bytes": None}
    return config, Report(settings={}, environment=environment, results=[Result(round=0, arm="bf16", answer=answer)])


def test_the_table_has_the_step_its_floor_and_what_no_kernel_is_by_hand(tmp_path):
    config, report = recorded(tmp_path, {"attention": 2.0, "linear layers": 15.5, "sampling": 0.0})
    (arm,) = config.arms
    columns = [
        "work",
        "arm",
        "context",
        "step ms",
        "floor ms",
        "floor / step",
        "attention",
        "linear layers",
        "no kernel",
    ]
    assert rollout_steps.columns(config, report) == columns
    floor = Prediction(config, report).floor_seconds(arm, 10, 125.0)
    # 7.07e9 parameters of the layers and the head in 2 bytes, and 28 layers x 4 heads x 128 x 2 x 2 bytes a token.
    assert floor == pytest.approx((14.14e9 + 1250 * 57344) / 4.3e12, rel=0.03)
    (row,) = rollout_steps.rows(config, report)
    assert rollout_steps.table(config, report).row_count == 1 and rollout_steps.notes(config, report) == []
    assert row[1:] == ["bf16", "125", "20.00", f"{1e3 * floor:.2f}", f"{floor / 0.02:.0%}", "2.00", "15.50", "2.50"]


def test_without_a_profile_there_is_no_table_and_no_picture(tmp_path):
    config, report = recorded(tmp_path, {}, profile=None)
    assert rollout_steps.columns(config, report) == [] and rollout_steps_figure.write(config, report) == []


def test_the_bar_of_a_step_has_its_large_parts_by_length_and_the_rest_as_one(tmp_path):
    config, report = recorded(tmp_path, {"attention": 2.0, "sampling": 0.2, "copies": 0.1, "linear layers": 15.5})
    (bar,) = rollout_steps_figure.bars(config, report)
    assert list(bar.parts) == ["linear layers", "attention", "the rest", "no kernel"]
    assert list(bar.parts.values()) == pytest.approx([15.5, 2.0, 0.3, 2.2])  # of (1.1 - 0.1) s / 50 steps
    assert bar.floor == pytest.approx(1e3 * Prediction(config, report).floor_seconds(config.arms[0], 10, 125.0))
    (picture,) = rollout_steps_figure.write(config, report)
    assert picture.stat().st_size > 10_000


def test_a_step_whose_prefill_took_as_long_as_the_whole_has_no_bar(tmp_path):
    config, report = recorded(tmp_path, {"attention": 2.0}, seconds=[0.1])
    assert rollout_steps_figure.bars(config, report) == [] and len(rollout_steps.rows(config, report)) == 1


def test_what_was_not_recorded_is_named_with_the_reason(tmp_path):
    config, report = recorded(tmp_path, {}, profile=None, unrecorded="a reason")
    assert rollout_steps.table(config, report) is None
    assert rollout_steps.notes(config, report) == ["no profile of 10 x (100 -> 51), bf16: a reason"]
