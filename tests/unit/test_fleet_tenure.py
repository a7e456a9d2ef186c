"""A phone's lease in one collector: what is given back stays given back, however the renewals run."""

from pathlib import Path

import pytest
from bmoe_collector.fleet import tenure as tenures
from bmoe_collector.fleet.phone import PhoneBoard
from bmoe_collector.fleet.tenure import Tenure
from bmoe_collector.store import leases
from bmoe_collector.store.engine import Store, open_store

UUID = bytes(range(16))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "runs.db"))


def made(store: Store, holder: str, renew_s: float = 6.0) -> Tenure:
    return Tenure(UUID, store, holder, 20.0, renew_s, PhoneBoard(), lambda *_: None)


def test_one_that_is_given_back_while_all_are_renewed_is_free(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made(store, "me", renew_s=0.0)
    assert mine.take()
    real = leases.renew

    def given_back_first(*arguments):
        mine.give_back()  # the phone went away in this moment
        return real(*arguments)

    monkeypatch.setattr(leases, "renew", given_back_first)
    tenures.renew_all(store, "me", [mine])
    assert not mine.ours()
    assert made(store, "you").take()


def test_one_that_another_host_took_is_not_ours_after_renewing_all(store: Store) -> None:
    mine = made(store, "me", renew_s=0.0)
    assert mine.take()
    with store.write() as connection:
        connection.execute(leases.LEASES.update().values(holder="you", token=2))
    tenures.renew_all(store, "me", [mine])
    assert not mine.ours()
    with pytest.raises(tenures.LeaseLostError):
        mine.keeping()
