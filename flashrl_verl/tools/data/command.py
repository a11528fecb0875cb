# SPDX-License-Identifier: Apache-2.0
"""The command `flashrl data`, which is `scripts/prepare_data.py` too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrl_verl.errors import ConfigError, DataError
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.data.catalog import Name, Split

if TYPE_CHECKING:
    from rich.console import Console

    from flashrl_verl.tools.data.prepare import Prepared, Request


def data(
    name: Annotated[Name | None, typer.Argument(help="The data set.", show_default=False)] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            help=(
                "A file (.parquet, .jsonl) or folder here, or a dataset on the Hugging Face hub; else where it is "
                "published."
            ),
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for <name>.parquet and its record, <name>.json.")] = Path("data"),
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch on the hub; else the commit that this version knows.")
    ] = None,
    split: Annotated[Split | None, typer.Option(help="One split only (gsm8k has both).")] = None,
    keep_duplicates: Annotated[
        bool | None,
        typer.Option(
            "--keep-duplicates/--unique",
            help=(
                "Copies of a prompt stay, or only the first. By default dapo-math-17k is made unique and the others "
                "are not."
            ),
            show_default=False,
        ),
    ] = None,
    drop_invalid: Annotated[
        bool, typer.Option("--drop-invalid", help="Leave out rows that cannot be used, instead of refusing the source.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Make it again, whatever file is there.")] = False,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Compare a prepared file with its record and check its rows; may be repeated."
        ),
    ] = None,
) -> None:
    """Prepare a published data set for verl: parquet, checked row by row before anything is written.

    A file that is there already and was made of the same source is left as it is. A folder for --source holds the files
    as published, or train.jsonl and test.jsonl (or .parquet), with the columns question and answer (gsm8k), or
    data_source, prompt, ability, reward_model and extra_info (the others).
    """
    if bool(check) == (name is not None):
        names = ", ".join(name.value for name in Name)
        raise ConfigError(f"Name one data set ({names}), or the files to --check. --help explains both.")
    if check:
        _until_stopped(lambda console: _check(check, console))
        return
    from flashrl_verl.tools.data.prepare import Request

    request = Request(
        name=name,
        output=output.expanduser(),
        source=source,
        revision=revision,
        split=split,
        keep_duplicates=keep_duplicates,
        drop_invalid=drop_invalid,
        force=force,
    )
    _until_stopped(lambda console: _prepare(request, console))


def _until_stopped(work: Callable[[Console], None]) -> None:
    """Do the work, or as much of it as is done when somebody stops the program."""
    from flashrl_verl.tools.process_tree import Stopped, stoppable

    console = new_console()
    try:
        with stoppable():
            work(console)
    except Stopped as stopped:
        console.print("stopped; no file is half-written")
        raise typer.Exit(stopped.exit_code) from None


def _prepare(request: Request, console: Console) -> None:
    from flashrl_verl.tools.data.bar import Bar
    from flashrl_verl.tools.data.prepare import prepare
    from flashrl_verl.tools.run_directory import check_output

    check_output(request.output)
    with Bar(console) as bar:
        prepared = prepare(request, bar, lambda line: _say(console, line))
    for file in prepared:
        _say(console, _summary(file))


def _check(paths: list[Path], console: Console) -> None:
    from flashrl_verl.tools.data.bar import Bar
    from flashrl_verl.tools.data.prepare import check

    wrong = 0
    for path in paths:
        try:
            with Bar(console) as bar:
                made = check(path.expanduser(), bar).record["output"]
        except DataError as error:
            wrong += 1
            typer.secho(f"DataError: {error}", fg="red", err=True)
        else:
            numbers = f"{made['rows']:,} rows, {made['prompts']:,} prompts"
            _say(console, f"{path}: as prepared: {numbers}, sha256 {made['sha256']}")
    if wrong:
        raise typer.Exit(1)


def _summary(file: Prepared) -> str:
    """What was made, and what of the source is not in it."""
    record = file.record
    made, source, findings = record["output"], record["source"], record["findings"]
    if not file.made:
        return (
            f"{file.path}: unchanged ({made['rows']:,} rows): made before of the same source. --force makes it again."
        )
    where = source["name"] if source["revision"] is None else f"{source['name']} at {source['revision'][:12]}"
    least, most = made["copies_in_source"]
    copies = "once" if most == 1 else f"{least} times" if least == most else f"{least} to {most} times"
    published = " (the published file)" if source["published"] else ""
    lines = [
        f"{file.path}: {made['rows']:,} rows, {made['prompts']:,} prompts",
        f"  of {source['rows']:,} rows of {where}{published}, each prompt {copies}",
    ]
    several = findings["prompts_with_several_answers"]
    if several:
        fate = "kept" if record["options"]["duplicates"] == "keep" else "left out"
        rows = sum(prompt["rows"] for prompt in several)
        lines.append(f"  {fate}: {len(several):,} prompts with different answers ({rows:,} rows)")
    if findings["invalid"]:
        lines.append(f"  left out: {findings['invalid']:,} rows that cannot be used")
    if findings["respelled_answers"]:
        lines.append(
            f"  in {findings['respelled_answers']:,} rows the answer is spelled as verl compares it (033 is 33)"
        )
    return "\n".join(lines)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
