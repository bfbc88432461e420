"""What is said to do where a place's call fails: by its cause, never by the names of what it was about."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from evenstep.place_errors import explained, is_without_bucket


def fix(url: str, error: BaseException) -> str:
    return explained(url, "step-1 was not uploaded", error).partition("\n  fix: ")[2]


def number(code: int, path: str = "/mnt/login/ssl-proxy/connect") -> OSError:
    return OSError(code, os.strerror(code), path)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (number(errno.EACCES), "its owner and mode"),
        (number(errno.EPERM), "its owner and mode"),
        (number(errno.ENOSPC), "make room there"),
        (number(errno.EDQUOT), "make room there"),
        (number(errno.EROFS), "mount it for writing"),
        (number(errno.ECONNREFUSED), "reaches it"),
        (number(errno.EHOSTUNREACH), "reaches it"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "reaches it"),
        (number(errno.EIO), ""),
        (number(errno.ENOTDIR), ""),
    ],
)
def test_folders_errors_go_by_their_number(error: OSError, word: str) -> None:
    said = fix("sftp://host/mnt/login/ssl-proxy/connect", error)
    assert (word in said) if word else said == "", said
    assert "credentials" not in said


@pytest.mark.parametrize(
    "error",
    [
        OSError("/mnt/login/connect ssl/step-1 is odd"),
        RuntimeError("'/mnt/login/connect ssl proxy/step-1' is odd"),
        RuntimeError("file:///mnt/login/connect ssl/step-1: odd"),
        RuntimeError("a loginless one, disconnectedness, resoluteness"),
        FileNotFoundError("/mnt/nosuchbucket/the bucket does not exist/step-1"),
    ],
)
def test_names_say_nothing(error: BaseException) -> None:
    assert fix("file:///mnt/login/connect ssl", error) == ""


def test_a_folder_is_no_bucket() -> None:
    assert not is_without_bucket(FileNotFoundError(errno.ENOENT, "gone", "/mnt/NoSuchBucket/the bucket does not exist"))


class EndpointConnectionError(Exception):
    """Its name is botocore's."""


class NoCredentialsError(Exception):
    """Likewise."""


class SSLError(Exception):
    """Likewise."""


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (EndpointConnectionError("failed"), "reaches it"),
        (SSLError("failed"), "reaches it"),
        (OSError("ReadTimeout on the endpoint"), "reaches it"),
        (OSError(errno.EIO, 'Could not connect to the endpoint URL: "http://login/x"'), "reaches it"),
        (NoCredentialsError("failed"), "credentials"),
        (PermissionError(errno.EACCES, "Access Denied"), "credentials"),
        (OSError(errno.EIO, "An error occurred (InvalidAccessKeyId) when calling PutObject"), "credentials"),
        (OSError(errno.EIO, "An error occurred (SignatureDoesNotMatch)"), "credentials"),
        (OSError(errno.EIO, "An error occurred (ExpiredToken)"), "credentials"),
        (FileNotFoundError("The specified bucket does not exist"), "there is no bucket"),
        (OSError("An error occurred (NoSuchBucket)"), "there is no bucket"),
    ],
)
def test_object_stores_errors_go_by_their_words(error: BaseException, word: str) -> None:
    said = explained("s3://bucket/login", "step-1 was not uploaded", error)
    assert word in said.replace("\n  fix: look whether", "") and "\n  fix: " in said, said


def test_what_it_came_of_counts() -> None:
    error = RuntimeError("failed")
    error.__cause__ = NoCredentialsError("x")
    assert "credentials" in fix("s3://bucket/run", error)
