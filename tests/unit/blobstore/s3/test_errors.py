import pytest

from blobstore.errors import (
    AccessDeniedError,
    BlobNotFoundError,
    CapabilityMissingError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnavailableError,
)
from blobstore.s3.errors import Refusal, classify, showable
from engine.cli.run import ExitCode, choose_exit_code

TABLE = [
    (403, "AccessDenied", AccessDeniedError),
    (403, "403", AccessDeniedError),
    (401, "Unauthorized", AccessDeniedError),
    (403, "SignatureDoesNotMatch", AccessDeniedError),
    (400, "ExpiredToken", AccessDeniedError),
    (400, "KMS.DisabledException", AccessDeniedError),
    (403, "QuotaExceeded", StoreFullError),
    (507, "507", StoreFullError),
    (404, "NoSuchKey", BlobNotFoundError),
    (404, "404", BlobNotFoundError),
    (404, "NoSuchUpload", BlobNotFoundError),
    (404, "NoSuchBucket", StoreMissingError),
    (400, "InvalidArgument", InvalidRequestError),
    (412, "PreconditionFailed", InvalidRequestError),
    (405, "MethodNotAllowed", CapabilityMissingError),
    (501, "NotImplemented", CapabilityMissingError),
    (411, "MissingContentLength", CapabilityMissingError),
    (400, "RequestTimeout", StoreUnavailableError),
    (400, "BadDigest", StoreUnavailableError),
    (400, "XAmzContentSHA256Mismatch", StoreUnavailableError),
    (409, "ConditionalRequestConflict", StoreUnavailableError),
    (409, "OperationAborted", StoreUnavailableError),
    (403, "RequestTimeTooSkewed", StoreUnavailableError),
    (429, "429", StoreUnavailableError),
    (500, "InternalError", StoreUnavailableError),
    (502, "502", StoreUnavailableError),
    (503, "SlowDown", StoreUnavailableError),
    (503, "503", StoreUnavailableError),
    (504, "504", StoreUnavailableError),
]


@pytest.mark.parametrize("status,code,kind", TABLE)
def test_every_refusal_has_its_class(status: int, code: str, kind: type[StoreError]) -> None:
    error = classify(Refusal(status=status, code=code), operation="get", key="k")
    assert type(error) is kind
    assert (error.operation, error.key) == ("get", "k")
    assert code in str(error)
    assert error.hint


@pytest.mark.parametrize(
    "status,code", [(301, "PermanentRedirect"), (307, "307"), (400, "AuthorizationHeaderMalformed")]
)
def test_a_bucket_elsewhere_is_a_wrong_setting(status: int, code: str) -> None:
    error = classify(Refusal(status=status, code=code, location="other:9000"), operation="get", key="k")
    assert choose_exit_code(error) is ExitCode.USAGE
    assert "other:9000" in error.hint


@pytest.mark.parametrize(
    "status,code,asks", [(503, "SlowDown", True), (429, "429", True), (503, "503", True), (500, "InternalError", False)]
)
def test_only_an_overload_asks_for_less(status: int, code: str, asks: bool) -> None:
    error = classify(Refusal(status=status, code=code, retry_after_s=7.0), operation="get", key="k")
    assert isinstance(error, StoreUnavailableError)
    assert error.asks_for_less is asks
    assert error.retry_after_s == 7.0


def test_a_refusal_reports_code_status_message_and_request() -> None:
    shown = str(Refusal(status=400, code="InvalidArgument", message="no such thing", request_id="id-7"))
    assert shown == "InvalidArgument (400): no such thing [request id-7]"
    assert str(Refusal(status=404, code="404")) == "404"


def test_a_message_is_reported_in_one_line_not_without_end_and_not_if_it_quotes_the_request() -> None:
    assert showable("a\n  b") == "a b"
    assert len(showable("m " * 1000)) == 200
    assert showable(f"token '{'FwoGZXIvYXdzE' * 20}' is of another region") == "token *** is of another region"
    assert showable(None) == ""
    for quote in ("Authorization: x", "x-amz-security-token:y", "StringToSign Signature=z", "CanonicalRequest"):
        assert showable(f"denied {quote}") == ""
