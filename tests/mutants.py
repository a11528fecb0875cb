# SPDX-License-Identifier: Apache-2.0
"""Which tests notice which fault: each mutant of the table is planted alone in a copy of the tree; its tests run there.

    python tests/mutants.py [NAME ...]

A NAME may be the beginning of several. A mutant is caught by the first test that fails. All tests are of the default
suite, and are taken to pass in the tree as it is. Exit status: 0 all caught, 1 one survived, 2 one could not be planted
or run. Where code has moved, adapt the entry: ``old`` must stand in ``file`` exactly once.
"""

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "build")
LIMIT_S = 1500
"""Seconds for one call of pytest."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault. Each string of ``tests`` is a call of pytest, in a shell's words, until one catches."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


NUMERICS, PARAMETER, KERNELS, GEMM = (
    f"flashrl_verl/quantization/{name}.py" for name in ("numerics", "parameter", "rows", "gemm")
)
SENDER, RECEIPT, LOAD = (f"flashrl_verl/refit/{name}.py" for name in ("sender", "receipt", "load"))
WEIGHTS, BATCH = "flashrl_verl/correction/weights.py", "flashrl_verl/correction/batch.py"
ROWS, GRADIENT = "tests/numerics/test_rows.py", "tests/numerics/test_tis_gradient.py"
WEIGHT, ROTATION = "tests/unit/test_quantized_weight.py", "tests/numerics/test_rotation.py"
SENT, RATIOS, SAVED = (f"tests/unit/test_{name}.py" for name in ("sender", "correction", "never_saved"))
ENGINE = "tests/e2e/test_engine_refit.py"
KEYS, EQUALIZE = "tests/e2e/test_equalized_keys.py -k stays", "flashrl_verl/attention/equalize.py"
UNACCOUNTED = f"{ENGINE} -k unaccounted"
SMOKE = "tests/e2e/test_recipe.py -k test_int8_rollouts_train_with_tis"
MATRIX, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def stale(name: str, file: str, before: str, when: str, *tests: str) -> Mutant:
    """``MATRIX`` in ``weights`` is replaced by that of the update before, ahead of the line ``before``."""
    lines = (
        'kept, weights = self.__dict__.setdefault("kept", {}), list(weights)',
        f"late = [(n, kept[n] if n in kept and {when} else t) for n, t in weights]",
        f'kept.update({{n: t.clone() for n, t in weights if n == "{MATRIX}"}})',
        "weights = late",
    )
    return Mutant(name, file, before, "".join(f"        {line}\n" for line in lines) + before, tests)


SMALL = "((t - kept[n]).abs() <= (kept[n].abs() / 64).clamp(min=1e-5)).all()"
"""No value moved by more than two BF16 steps or 1e-5, as at a learning rate of 1e-6."""
CAST = "        yield name, tensor.to(wire_dtype(name, tensor.dtype, dtype), non_blocking=True)"
OWN_ROWS, EARLIER = "loaded_weight.narrow(0, self.tp_rank * rows, rows)", "rows - (self.tp_rank == 1), rows"
QKV = "self._quantize(loaded_weight.narrow(0, self.tp_rank // replicas * rows, rows), offset, 0)"
EQUAL_HEADS = "3 * rows == len(self.data)"
SWAPPED = QKV.replace("offset", f'{{"q": rows, "k": 0}}.get(kwargs["shard_id"], offset) if {EQUAL_HEADS} else offset')


def dropped(name: str, tensor: str) -> Mutant:
    """The sender leaves ``tensor`` out, in every precision; both receipts are of what is left."""
    return Mutant(name, SENDER, CAST, f'        if name != "{tensor}":\n    {CAST}', (SENT,))


def skipped(name: str, tensor: str) -> Mutant:
    """The model's loader never sees ``tensor``, in any update; the receipts are of what arrived."""
    line = "                yield self._loading, tensor"
    return Mutant(name, LOAD, line, f'                if self._loading != "{tensor}":\n    {line}', (ENGINE,))


MUTANTS = [
    # The largest value of every row would be 128 steps, and is clamped: almost a percent too small.
    Mutant("scale_128", NUMERICS, "full_like(absmax, fmt.code_max)",
        "full_like(absmax, fmt.code_max + fmt.rounds_to_integers)", (ROWS,)),
    # A bias of half a step upwards on every tie.
    Mutant("round_half_up", NUMERICS, "codes = codes.round_()", "codes = (codes + 0.5).floor_()", (ROWS,)),
    # A rotation on one side only, or not the one that weights and activations agree on.
    Mutant("rotation_not_of_weights", KERNELS, "weight = numerics.rotate_weight(weight, fmt.block(codes.shape[1]))\n",
        "weight = weight\n", (ROWS,)),
    Mutant("rotation_not_of_activations", GEMM, "numerics.rotate(x, fmt.block(x.shape[-1]))", "x", (ROTATION,)),
    Mutant("rotation_not_of_last_block", NUMERICS, "rotate(weight, block) * (1.0 / block)",
        "torch.cat([rotate(weight[..., :-block], block) / block, weight[..., -block:].float()], -1)", (ROWS,)),
    Mutant("rotation_of_another_order", NUMERICS, "torch.stack([a + b, a - b], 1)", "torch.stack([a + b, a - b], 2)",
        (ROWS,)),
    Mutant("rotation_by_whole_row", KERNELS, "numerics.rotate_weight(weight, fmt.block(codes.shape[1]))",
        "numerics.rotate_weight(weight, fmt.block(weight.shape[1]))", (ROWS,)),
    # Keys in other units than queries, or than what is cached already.
    Mutant("keys_scaled_alone", EQUALIZE, "-1, size) * scale.unsqueeze(1)", "-1, size) + 0 * scale.unsqueeze(1)",
        ("tests/numerics/test_equalize.py",)),
    Mutant("keys_of_another_head", EQUALIZE, "(keys.amax(0) + keys.amin(0)) / 2 *",
        "((keys.amax(0) + keys.amin(0)) / 2).roll(1, 0) *", (KEYS,)),
    Mutant("keys_of_the_first_weights", LOAD, "                measure(self.model, self._model_config)",
        "                self._first is None and measure(self.model, self._model_config)", (KEYS,)),
    # The rollout stays the policy of the first step.
    Mutant("second_update_not_quantized", PARAMETER, "        self.loaded_elements += codes.numel()",
        '        self.ever = self.__dict__.get("ever", 0) + codes.numel()\n'
        "        self.loaded_elements += codes.numel() * (self.ever <= self.data.numel())", (ENGINE,)),
    Mutant("second_update_keeps_codes", PARAMETER, "        self.loaded_elements += codes.numel()",
        '        first = self.__dict__.setdefault("first", {})\n'
        "        codes.copy_(first.setdefault((first_row, first_column), codes.clone()))\n"
        "        self.loaded_elements += codes.numel()", (ENGINE,)),
    # What was never sent stays poison, and the receipts agree on what is left.
    dropped("drop_weight", MATRIX),
    dropped("drop_norm", NORM),
    Mutant("drop_is_not_missed", LOAD, "if bad := non_finite(held):", "if bad := []:",
        (UNACCOUNTED,)),
    # A loader that takes a tensor and writes nothing, or a part.
    skipped("loader_skips_weight", MATRIX),
    skipped("loader_skips_norm", NORM),
    skipped("loader_skips_half_bias", "model.layers.0.self_attn.k_proj.bias"),
    # No health metric moves when one tensor is a step old.
    stale("stale_engine", LOAD, "        buffers = [(name, tensor) for", "True", ENGINE),
    stale("stale_engine_small", LOAD, "        buffers = [(name, tensor) for", SMALL, ENGINE),
    Mutant("stale_not_compared", RECEIPT, '"{name} {words}".encode()', '"{name}".encode()',
        ("tests/unit/test_receipt.py",)),
    Mutant("stale_sender", SENDER, CAST,
        f'        kept = cast_for_rollout.__dict__.setdefault("kept", {{}})\n'
        f'        if name == "{MATRIX}":\n'
        "            tensor, kept[name] = kept.get(name, tensor), tensor.clone()\n" + CAST, (SENT,)),
    # Attention of another model, with every shape right. Where counts of heads are equal; on one rank alone.
    Mutant("swap_qk", PARAMETER, QKV, SWAPPED, (WEIGHT,)),
    Mutant("swap_qk_one_rank", PARAMETER, QKV, SWAPPED.replace(EQUAL_HEADS, f"self.tp_size == 1 and {EQUAL_HEADS}"),
        (WEIGHT,)),
    # Every row of rank 1 belongs to its neighbour.
    Mutant("tp_column", PARAMETER, f"{OWN_ROWS}, 0, 0)", f"{OWN_ROWS.replace('rows, rows', EARLIER)}, 0, 0)",
        (WEIGHT,)),
    Mutant("tp_merged", PARAMETER, f"{OWN_ROWS}, offset, 0)", f"{OWN_ROWS.replace('rows, rows', EARLIER)}, offset, 0)",
        (WEIGHT,)),
    Mutant("tp_qkv", PARAMETER, QKV, QKV.replace("rows, rows", EARLIER), (WEIGHT,)),
    Mutant("tp_row", PARAMETER, "self._quantize(loaded_weight, 0, self.tp_rank * columns)",
        "self._quantize(loaded_weight, 0, self.tp_rank * columns - (self.tp_rank == 1))", (WEIGHT,)),
    # The variance that the cap is there for.
    Mutant("cap_plus_one", WEIGHTS, "rollout_is_threshold=settings.threshold",
        "rollout_is_threshold=settings.threshold if settings.lower else settings.upper + 1", (GRADIENT,)),
    # Rejection that the metrics tell of and the loss does not know.
    Mutant("reject_in_metrics_only", BATCH, ', "response_mask": correction.kept}', "}", (RATIOS,)),
    # Raw log-probs leave out the temperature: every ratio is that of another sampler, though at 1.0 they are the same.
    Mutant("raw_accepted", "flashrl_verl/validation.py", 'one_of("processed_logprobs")',
        'one_of("processed_logprobs", "raw_logprobs")', ("tests/unit/test_validation.py",)),
    Mutant("raw_engine_argument_accepted", "flashrl_verl/validation.py", '"logprobs_mode", "max_model_len"',
        '"max_model_len"', ("tests/unit/test_validation.py",)),
    Mutant("raw_in_experiment", "flashrl_verl/configs/experiment/base.yaml", "logprobs_mode: processed_logprobs",
        "logprobs_mode: raw_logprobs", ("tests/unit/test_configs_compose.py -k is_valid",)),
    Mutant("raw_asked_for", "flashrl_verl/rollout/server.py", "super()._preprocess_engine_kwargs(engine_kwargs)\n",
        'super()._preprocess_engine_kwargs(engine_kwargs)\n        engine_kwargs["logprobs_mode"] = "raw_logprobs"\n',
        (SMOKE,)),
    # One NaN becomes a policy, a checkpoint, or a loss of NaN.
    Mutant("nan_saved", "flashrl_verl/trainer/trainer.py",
        "sorted({name for names in self.actor_rollout_wg.flashrl_non_finite() for name in names})", "[]", (SAVED,)),
    Mutant("nan_not_seen", "flashrl_verl/trainer/worker.py", "return non_finite(found)", "return []", (SAVED,)),
    Mutant("nan_rollout_log_probs", BATCH, "    if bad_rollout:", "    if False:", (f"{RATIOS} -k not_finite",)),
    Mutant("nan_old_log_probs", BATCH, "    if bad_old:", "    if False:", (f"{RATIOS} -k not_finite",)),
    # A token is written behind its request's last page.
    Mutant("no_page_taken", "flashrl_verl/rollout/scheduler.py", "all_shared and tokens <=",
        "all_shared and tokens - 1 <=", ("tests/e2e/test_scheduler.py -k not_asked",)),
]  # fmt: skip


class CannotRun(Exception):
    """A mutant that says nothing about its tests."""


def plant(mutant: Mutant, tree: Path) -> None:
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise CannotRun(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, not once")
    text = text.replace(mutant.old, mutant.new)
    if path.suffix == ".py":
        compile(text, str(path), "exec")
    path.write_text(text)


def survives(mutant: Mutant, tree: Path) -> str:
    """Empty when a test fails in the copy, whose code is the one that is imported, in every process."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and Path(path).resolve() != ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *others])}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow", "-rfE", "--tb=no"]
    own = ["-c", f"import flashrl_verl as p; assert p.__file__.startswith({str(tree)!r})"]
    for words in (own, *(["-m", "pytest", *options, *shlex.split(tests)] for tests in mutant.tests)):
        process = subprocess.Popen([sys.executable, *words], cwd=tree, env=env, start_new_session=True)
        try:
            status = process.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a test left running
        if words is not own and status == 1:
            return ""
        if status:
            raise CannotRun(f"{shlex.join(words)} ended with {status}")
    return f"survived {' ; '.join(mutant.tests)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if not any(mutant.name.startswith(name) for mutant in MUTANTS)]
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with us
    worst = 0
    for mutant in (m for m in MUTANTS if m.name.startswith(tuple(asked.names) or "")):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            tree = Path(shutil.copytree(ROOT, Path(folder).resolve() / "tree", ignore=LEFT_OUT))
            try:
                plant(mutant, tree)
                said = survives(mutant, tree)
                status = int(bool(said))
            except (CannotRun, SyntaxError, subprocess.TimeoutExpired) as error:
                said, status = f"COULD NOT RUN: {error}", 2
        worst = max(worst, status)
        print(f"{mutant.name:30} {time.monotonic() - started:5.0f} s  {said or 'caught'}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
