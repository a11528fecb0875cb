# SPDX-License-Identifier: Apache-2.0
"""What tells two results of one version apart."""

from flashrl_verl.tools.software import machine_digest, package_digest


def test_the_packages_digest_is_of_what_its_modules_say_and_are_called(tmp_path):
    def package(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        (tmp_path / name / "notes.txt").write_text(name)
        return package_digest(tmp_path / name)

    one = package("one", a="x = 1")
    assert one == package("two", a="x = 1") and one not in (package("three", a="x = 2"), package("four", b="x = 1"))


def test_a_machine_is_known_by_its_boot_or_by_its_name(tmp_path):
    boots = [tmp_path / name for name in ("one", "two")]
    for boot in boots:
        boot.write_text(f"{boot.name}\n")
    assert len({machine_digest(boot) for boot in (*boots, tmp_path / "none")}) == 3
    assert machine_digest(boots[0]) == machine_digest(boots[0])
