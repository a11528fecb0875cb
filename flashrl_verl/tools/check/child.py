# SPDX-License-Identifier: Apache-2.0
"""A check in a fresh interpreter, as verl's and vLLM's processes are, with a time limit.

The child writes one JSON line a finding to a file, so that what it found before it crashed or hung is known.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrl_verl.tools.check.findings import Finding, fail, guarded, skipped
from flashrl_verl.tools.check.settings import CheckSettings
from flashrl_verl.tools.log_excerpt import last_error

_PROGRAM = "import sys; from flashrl_verl.tools.check.child import main; main(*sys.argv[1:])"
"""By -c, not as a file or module: a file would put its own folder, a module the working directory on the path."""


@dataclass
class Report:
    """What one process found."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """What is compared between nodes, by name."""

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings.extend(findings)


def run_child(
    module: str,
    subjects: tuple[str, ...],
    settings: CheckSettings,
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    **more: Any,
) -> Report:
    """Run ``flashrl_verl.tools.check.<module>.run`` in a fresh Python.

    Args:
        module: its ``run(settings, **more)`` yields findings, and pairs (name, value) of facts.
        subjects: names of findings that it makes in any case; those that did not come are reported as failed or not
            checked.
        settings: of the check.
        environment: the child's; None for this process's.
        limit_s: longest time for the child, seconds; None for ``settings.timeout_s``.
        **more: further arguments of ``run``, as JSON.

    Returns:
        What the child found, and how it ended if that was not well.
    """
    try:
        return _ask(module, subjects, settings, os.environ if environment is None else environment, limit_s, more)
    except Exception as error:  # noqa: BLE001 - a full disk, no rights: what such a machine is looked at for
        text = f"its process could not be asked: {type(error).__name__}: {error}"
        remedy = "room and rights in the temporary folder (/tmp, or TMPDIR), or TMPDIR=<another one>"
        report = Report([fail(subjects[0] if subjects else name_of(module), text, remedy)])
        report.add(skipped(subject, "its process could not be asked") for subject in subjects[1:])
        return report


def _ask(
    module: str,
    subjects: tuple[str, ...],
    settings: CheckSettings,
    environment: Mapping[str, str],
    limit_s: float | None,
    more: dict[str, Any],
) -> Report:
    with tempfile.TemporaryDirectory(prefix="flashrl-check-") as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        result.touch()
        words = [module, str(result), json.dumps(settings.to_dict()), json.dumps(more)]
        ended = _run(words, log, folder, settings.timeout_s if limit_s is None else limit_s, environment)
        report = _read(result.read_text())
        seen = {finding.name for finding in report.findings}
        missing = [subject for subject in subjects if subject not in seen]
        if not ended and name_of(module) in seen:  # ``main`` has said why
            report.add(skipped(subject, "the check ended before") for subject in missing)
        elif ended or missing:
            said = " ".join(last_error(log.read_text(errors="replace"))[:3])
            why = ended or "ended without an answer"
            remedy = (
                "the last words of the process say what is wrong; `flashrl check --timeout <s>` if it was only slow"
            )
            report.findings.append(
                fail(missing[0] if missing else name_of(module), f"its process {why}: {said or 'no output'}", remedy)
            )
            report.add(skipped(subject, f"its process {why} before") for subject in missing[1:])
        return report


def _read(result: str) -> Report:
    """The whole lines of a child's answer: a full disk, or its end, cuts the last one off."""
    report = Report()
    for line in result.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "fact" in entry:
            report.facts.update(entry["fact"])
        else:
            report.findings.append(Finding(**entry))
    return report


def name_of(module: str) -> str:
    """Subject of what goes wrong with a module as a whole."""
    return module.replace("_", " ")


def _run(words: list[str], log: Path, folder: str, timeout_s: float, environment: Mapping[str, str]) -> str | None:
    """Run the child in a folder of its own. Returns how it ended, None when well."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words], cwd=folder, env=dict(environment), stdout=stream,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its session: whatever it started ends with it
                process.wait()
    if code is None:
        return f"did not end within {timeout_s:g} s and was stopped"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else None


def main(module: str, result: str, settings: str, more: str) -> None:
    """The child: run one module of this package and write what it yields, line by line."""
    wanted = CheckSettings(**json.loads(settings))
    run: Callable[..., Iterable[Any]] = importlib.import_module(f"flashrl_verl.tools.check.{module}").run
    with open(result, "a") as stream:
        for found in guarded(name_of(module), run, wanted, **json.loads(more)):
            entry = found.to_dict() if isinstance(found, Finding) else {"fact": dict([found])}
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
