# SPDX-License-Identifier: Apache-2.0
"""What tells two results of one version apart."""

import hashlib

from flashrl_verl.tools.software import machine_digest, package_digest


def test_the_packages_digest_is_of_what_its_modules_say_and_are_called(tmp_path):
    def package(name: str, files: dict[str, str]):
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return package_digest(tmp_path / name)

    one = package("one", {"a.py": "x = 1", "b/c.py": "y = 2"})
    assert one == package("two", {"a.py": "x = 1", "b/c.py": "y = 2", "b/notes.txt": "no module"})
    assert (
        len(
            {
                one,
                package("three", {"a.py": "x = 2", "b/c.py": "y = 2"}),
                package("four", {"a.py": "x = 1", "c.py": "y = 2"}),
            }
        )
        == 3
    )
    assert len(package_digest()) == 12


def test_a_machine_is_known_by_its_boot_or_by_its_name(tmp_path, monkeypatch):
    boots = [tmp_path / name for name in ("one", "two")]
    for boot in boots:
        boot.write_text(f"{boot.name}\n")
    monkeypatch.setattr("platform.node", lambda: "a-host")
    found = [machine_digest(boot) for boot in (*boots, tmp_path / "none")]
    assert found[2] == hashlib.sha256(b"a-host").hexdigest()[:12] and len({*found}) == 3
    assert machine_digest(boots[0]) == found[0]
