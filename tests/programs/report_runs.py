# SPDX-License-Identifier: Apache-2.0
"""Metrics files of small runs, whose figures can be worked out by hand."""

import json

HELD_OUT = "val-core/toy_addition/acc/mean@1"
KL, ESS, CUT = (
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_ratio_fraction_high",
)
DROPPED, REJECTED = "rollout_corr/rollout_is_oob_ratio", "rollout_corr/rollout_rs_masked_fraction"


def metrics(score: float, seconds: tuple[float, ...], layers: int = 8, **more) -> list[str]:
    """Steps 0 to len(seconds) of a run: validated at both ends, 60 % of a step spent on the rollout."""
    lines = [json.dumps({"step": 0, "data": {HELD_OUT: 0.25}})]
    for step, s in enumerate(seconds, start=1):
        data = {
            "timing_s/step": s,
            "timing_s/gen": 0.6 * s,
            "timing_s/update_actor": 0.3 * s,
            "perf/throughput": 100.0 * step,
        }
        data |= {KL: step * 1e-4, ESS: 1 - 0.01 * step, CUT: 0.001 * step, "rollout_corr/rollout_is_mean": 1.0}
        data |= {
            "critic/score/mean": score,
            "flashrl/quantized_layers": layers,
            "flashrl/refit_seconds": 0.1 * step,
            **more,
        }
        lines.append(json.dumps({"step": step, "data": data | ({HELD_OUT: 0.75} if step == len(seconds) else {})}))
    return lines


def make_run(folder, lines, **facts):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if facts:
        correction = {"rollout_is": "token", "rollout_is_threshold": 2.0}
        (folder / "run.json").write_text(json.dumps({"precision": "int8", "correction": correction, **facts}))
    return folder


def two_runs(tmp_path):
    """INT8 with TIS as the quickstart records it, and a plain metrics file of a BF16 run without a correction."""
    int8 = make_run(
        tmp_path / "first", metrics(0.5, (4.0, 6.0)), seed=3, command="python -m x 'a|b' y.z=1", total_steps=5
    )
    plain = [json.loads(line) for line in metrics(0.6, (2.0, 2.0, 2.0), layers=0)]
    for line in plain:
        line["data"] = {key: v for key, v in line["data"].items() if key not in (ESS, CUT) and "rollout_is" not in key}
    bf16 = tmp_path / "flashrl" / "dapo-bf16.jsonl"
    bf16.parent.mkdir()
    bf16.write_text("\n".join(map(json.dumps, plain)))
    return [int8, bf16]


def cells(result, row: int) -> dict[str, str]:
    return dict(zip(result.summary.header, result.summary.rows[row], strict=True))
