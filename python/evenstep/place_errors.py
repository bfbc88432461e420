"""What drivers of other places say where a call fails, with what to do about it."""

from __future__ import annotations

import re
import socket

# Folders need no making there, and their drivers' makedirs would make the bucket, whose name may be a wrong one.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})

_NO_BUCKET = re.compile(r"NoSuchBucket|(bucket|container) does not exist", re.IGNORECASE)
_REFUSED = re.compile(
    r"credential|access ?key|signature|forbidden|access ?denied|unauthorized|(expired|invalid) ?token|login",
    re.IGNORECASE,
)
_NOT_REACHED = re.compile(r"connect|name or service|resol|timed? ?out|unreachable|ssl|proxy", re.IGNORECASE)


def _said(error: BaseException) -> str:
    """By it, and by what it came of: drivers put stores' own words there."""
    words: list[str] = []
    at: BaseException | None = error
    while at is not None and len(words) < 8:
        words.append(f"{type(at).__name__} {at}")
        at = at.__cause__ or at.__context__
    return "\n".join(words)


def is_without_bucket(error: BaseException) -> bool:
    return _NO_BUCKET.search(_said(error)) is not None


def _fix_for(error: BaseException) -> str:
    """ "": none is known."""
    said = _said(error)
    if isinstance(error, PermissionError) or _REFUSED.search(said):
        return (
            f"give host {socket.gethostname()} credentials that may read, write, list and remove there (of S3: AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or ~/.aws; of others: the driver's own, or ~/.config/fsspec)"
        )
    if isinstance(error, (ConnectionError, TimeoutError)) or _NOT_REACHED.search(said):
        return (
            f"look whether host {socket.gethostname()} reaches it (network, name, proxy; of an S3 that is not Amazon's: "
            "AWS_ENDPOINT_URL)"
        )
    return ""


def explained(url: str, what: str, error: BaseException) -> str:
    """The place, what was asked of it, the cause, and the fix where one is known."""
    said, fix = f"{type(error).__name__}: {error}", _fix_for(error)
    if is_without_bucket(error):
        bucket = url.partition("://")[2].partition("/")[0]
        said = f"there is no bucket {bucket}"
        fix = f"make it (of Amazon's S3: `aws s3 mb s3://{bucket}`), or give the right name: Evenstep makes none"
    return f"{url}: {what}: {said}" + (f"\n  fix: {fix}" if fix else "")
