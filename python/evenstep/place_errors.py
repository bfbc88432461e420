"""What drivers of other places say where a call fails, with what to do about it."""

from __future__ import annotations

import errno
import re
import socket

# Folders need no making there, and their drivers' makedirs would make the bucket, whose name may be a wrong one.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})

# In words that CamelCase is taken apart into.
_NO_BUCKET = re.compile(r"\bno such bucket\b|\b(bucket|container) does not exist\b", re.IGNORECASE)
_REFUSED = re.compile(
    r"\b(credentials?|access ?key|signature|forbidden|access ?denied|unauthorized|(expired|invalid) ?token|login)\b",
    re.IGNORECASE,
)
_NOT_REACHED = re.compile(
    r"\b(connect(ed|ing|ions?|or)?|disconnected|name or service|resol(ve|ved|ver|ving|ution)|timed? ?out|unreachable|ssl|proxy)\b",
    re.IGNORECASE,
)
_PLACES = re.compile(r"""'[^'\n]*/[^'\n]*'|"[^"\n]*/[^"\n]*"|\S*/\S*""")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _said(error: BaseException, url: str = "") -> str:
    """By it, and by what it came of: drivers put stores' own words there. Without paths, whose names say nothing of it."""
    words: list[str] = []
    path = url.partition("://")[2].rstrip("/")
    at: BaseException | None = error
    while at is not None and len(words) < 8:
        text = str(at)
        if isinstance(at, OSError):
            for place in (at.filename, at.filename2):
                text = text.replace(str(place), "/") if place else text
        text = text.replace(path, "/") if "/" in path else text
        words.append(f"{type(at).__name__} {_PLACES.sub(' ', text)}")
        at = at.__cause__ or at.__context__
    return _CAMEL.sub(" ", "\n".join(words))


def is_without_bucket(error: BaseException) -> bool:
    return _NO_BUCKET.search(_said(error)) is not None


_NETWORK = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}


def _not_reached() -> str:
    return (
        f"look whether host {socket.gethostname()} reaches it (network, name, proxy; of an S3 that is not Amazon's: "
        "AWS_ENDPOINT_URL)"
    )


def _fix_by_number(error: OSError) -> str:
    """Of a place with folders, whose errors are an operating system's."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"let the user of this process on host {socket.gethostname()} (of another machine's place: the one that logs in "
            "there) write to that folder, list it and remove from it: its owner and mode, and those of the folders above"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there (the file system is full, or the user's quota of it is), or name another place"
    if error.errno == errno.EROFS:
        return "mount it for writing, or name another place"
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or error.errno in _NETWORK:
        return _not_reached()
    return ""


def _fix_for(error: BaseException, url: str) -> str:
    """ "": none is known."""
    if isinstance(error, OSError) and error.errno is not None and url.partition("://")[0] not in OBJECT_STORES:
        return _fix_by_number(error)
    said = _said(error, url)
    if isinstance(error, PermissionError) or _REFUSED.search(said):
        return (
            f"give host {socket.gethostname()} credentials that may read, write, list and remove there (of S3: AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or ~/.aws; of others: the driver's own, or ~/.config/fsspec)"
        )
    if isinstance(error, (ConnectionError, TimeoutError)) or _NOT_REACHED.search(said):
        return _not_reached()
    return ""


def explained(url: str, what: str, error: BaseException) -> str:
    """The place, what was asked of it, the cause, and the fix where one is known."""
    said, fix = f"{type(error).__name__}: {error}", _fix_for(error, url)
    if is_without_bucket(error):
        bucket = url.partition("://")[2].partition("/")[0]
        said = f"there is no bucket {bucket}"
        fix = f"make it (of Amazon's S3: `aws s3 mb s3://{bucket}`), or give the right name: Evenstep makes none"
    return f"{url}: {what}: {said}" + (f"\n  fix: {fix}" if fix else "")
