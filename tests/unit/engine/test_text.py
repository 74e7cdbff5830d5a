import pytest

from engine.text import without_credentials

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text, shown",
    [
        (f"s3://key:{SECRET}@bucket/p", "s3://***@bucket/p"),
        (f"s3://key:abc/{SECRET}+x@bucket/p", "s3://***@bucket/p"),
        (f"s3:/key:abc/{SECRET}@bucket", "s3:/***@bucket"),
        (f"//key:{SECRET}@bucket", "//***@bucket"),
        (f"https://host/p?sig={SECRET}#{SECRET}", "https://host/p?***"),
        # The @ is one of the query: what comes after it is more of the query.
        (f"https://host/p?mail=a@b&sig={SECRET}", "https://***"),
        (f"got s3://a:{SECRET}@b and s3a://{SECRET}@c/d; see x", "got s3://***@b and s3a://***@c/d; see x"),
    ],
)
def test_no_secret_of_a_url_is_left(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/team/state",
        "file:///data/a%20b",
        "/data//a?b",
        "*.s?t",
        "name@home",
        "memory://a",
        "what? no #1",
        "",
    ],
)
def test_what_holds_none_stays_as_it_is(text: str) -> None:
    assert without_credentials(text) == text
