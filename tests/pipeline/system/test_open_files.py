"""The limit on open files: raised as far as the system allows, refused where that is too little."""

import resource

import pytest

from longhaul.pipeline.system.open_files import check_open_files

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "ranks", "raised"),
    [
        ((1024, 4096), 1, None),
        ((1024, 4096), 180, None),
        ((1024, 4096), 181, 1028),
        ((1024, ENDLESS), 1024, 5243),
        ((ENDLESS, ENDLESS), 1024, None),
        ((20, 128), 1, 128),
    ],
)
def test_the_limit_is_raised_to_what_the_ranks_need(
    limits: tuple[int, int], ranks: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr("resource.getrlimit", lambda what: limits)
    monkeypatch.setattr("resource.setrlimit", lambda what, to: found.append(to))
    check_open_files(ranks)
    assert found == ([] if raised is None else [(raised, limits[1])])


def test_too_low_a_limit_of_the_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (1024, 4096))
    told = "found a limit of 4,096 open files, wanted 5,243 or more by 1,024 ranks: ulimit -Hn"
    with pytest.raises(RuntimeError, match=told):
        check_open_files(1024)
