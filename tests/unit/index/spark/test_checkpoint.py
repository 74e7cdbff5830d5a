"""What the offsets of a commit say of a backup, and how its stores are named (design 0005, P8)."""

import pytest

from index.errors import BatchLogError, UnknownFormatError, UnsafeNameError
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, CheckpointBackup, StoreId, decode_checkpoint_backup

BACKUP = CheckpointBackup(query_id="5f0c", batch=17, oldest_batch=12, location="s3://bucket/flights")
TEXT = (
    '{"kind":"spark-checkpoint","format":1,"queryId":"5f0c","batch":17,"oldestBatch":12,'
    '"location":"s3://bucket/flights"}'
)


def test_a_backup_is_json_with_its_fields_in_order() -> None:
    assert BACKUP.encode() == TEXT
    assert decode_checkpoint_backup(TEXT) == BACKUP


def test_a_field_that_a_newer_writer_adds_is_passed_over() -> None:
    assert decode_checkpoint_backup(TEXT[:-1] + ',"sparkVersion":"5.0"}') == BACKUP


@pytest.mark.parametrize("offsets", ["", "2013-08", "17", "[]", "{}", '{"kind":"flights"}', '{"kind":3}', "\ud800"])
def test_other_offsets_are_no_backup(offsets: str) -> None:
    assert decode_checkpoint_backup(offsets) is None


def test_a_newer_format_is_not_guessed_at() -> None:
    with pytest.raises(UnknownFormatError, match="format 2"):
        decode_checkpoint_backup(TEXT.replace('"format":1', '"format":2'))


@pytest.mark.parametrize(
    "change", [('"batch":17', '"batch":-1'), ('"batch":17', '"batch":11'), ('"oldestBatch":12', '"oldestBatch":-1')]
)
def test_numbers_that_make_no_sense_are_refused(change: tuple[str, str]) -> None:
    with pytest.raises(BatchLogError, match="says batches"):
        decode_checkpoint_backup(TEXT.replace(*change))


@pytest.mark.parametrize("change", [('"queryId":"5f0c",', ""), ('"batch":17', '"batch":"17"')])
def test_a_backup_that_lacks_something_is_refused(change: tuple[str, str]) -> None:
    with pytest.raises(BatchLogError, match="cannot be read"):
        decode_checkpoint_backup(TEXT.replace(*change))


@pytest.mark.parametrize(
    "of, task, path, text",
    [
        (StoreId(0, 3), "0-3", "state/0/3", "0/3"),
        (StoreId(12, 0, "left-keyToNumValues"), "12-0", "state/12/0/left-keyToNumValues", "12/0/left-keyToNumValues"),
    ],
)
def test_a_store_is_named_and_found_again(of: StoreId, task: str, path: str, text: str) -> None:
    assert (of.task, of.path, str(of)) == (task, path, text)
    assert StoreId.parse(of.task, of.store) == of


@pytest.mark.parametrize("task", ["", "0", "query", "-", "0-", "-1", "0-1-2", "00-1", "0-01", "a-1", "0-²", "+1-1"])
def test_other_tasks_are_no_stores(task: str) -> None:
    assert StoreId.parse(task, "default") is None


def test_the_files_of_the_query_are_no_store() -> None:
    assert StoreId.parse(QUERY_TASK, QUERY_STORE) is None


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_a_store_whose_name_leads_elsewhere_has_no_path(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        _ = StoreId(0, 0, name).path


def test_stores_sort_by_number() -> None:
    assert sorted([StoreId(10, 0), StoreId(2, 11), StoreId(2, 3)]) == [StoreId(2, 3), StoreId(2, 11), StoreId(10, 0)]
