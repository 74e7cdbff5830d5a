"""The times of a collection's rules are the store's, unless nothing is deleted by them."""

import pytest
from typing_extensions import override

from blobstore.errors import StoreFullError
from blobstore.memory import MemoryStore
from engine.cli.session import choose_rules, resolve_rules
from engine.repository.repository import SyncRepository
from engine.text import parse_moment


class FullStore(MemoryStore):
    full = False

    @override
    async def now_ms(self) -> int:
        if self.full:
            raise StoreFullError("no space left", operation="now_ms")
        return await super().now_ms()


def test_only_a_dry_run_goes_by_this_machines_clock() -> None:
    store = FullStore()
    rules = choose_rules(keep_since=parse_moment("1h"), keep_named=True, policy=None)
    assert rules is not None
    with SyncRepository.init(store) as repository:
        store.full = True
        assert len(resolve_rules(repository, rules, dry_run=True).rules) == 1
        with pytest.raises(StoreFullError):
            resolve_rules(repository, rules, dry_run=False)
