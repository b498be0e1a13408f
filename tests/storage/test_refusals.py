"""What stores say to a wrong region, to credentials that expired, to unknown hosts: one sentence that says what to do."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import CheckpointError, ShardwiseError, SourceError
from shardwise.storage import is_file
from shardwise.storage.other_clients import text_of
from tests.harness.object_store import BUCKET, SECRET, Do, Proxy, Reply, S3Server
from tests.storage.test_saves import small_state

ROOT = f"s3://{BUCKET}"
_IDS = "<RequestId>656c76696e6727732072</RequestId><HostId>Uuag1LuByRx9e6j5Onimru9pO4ZVKnJ2Qz7</HostId>"
_REGION = {"x-amz-bucket-region": "eu-west-1"}


def error(code: str, message: str, more: str = "") -> str:
    """As S3 writes it."""
    xml = '<?xml version="1.0" encoding="UTF-8"?>'
    return f"{xml}\n<Error><Code>{code}</Code><Message>{message}</Message>{more}{_IDS}</Error>"


#: By what is wrong: S3's reply, and what we say.
REPLIES = {
    "region, moved": (
        Reply(
            301,
            error(
                "PermanentRedirect",
                "The bucket you are attempting to access must be addressed using the specified endpoint. "
                "Please send all future requests to this endpoint.",
                f"<Endpoint>{BUCKET}.s3.eu-west-1.amazonaws.com</Endpoint><Bucket>{BUCKET}</Bucket>",
            ),
            _REGION,
        ),
        "the bucket is in region eu-west-1: set AWS_REGION=eu-west-1, or",
    ),
    "region, no header": (
        Reply(301, error("PermanentRedirect", "The bucket you are attempting to access ...")),
        "the bucket is in another region: set its own by AWS_REGION",
    ),
    "region, signed for another": (
        Reply(
            400,
            error(
                "AuthorizationHeaderMalformed",
                "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'",
                "<Region>eu-west-1</Region>",
            ),
            _REGION,
        ),
        "the bucket is in region eu-west-1: set AWS_REGION=eu-west-1, or",
    ),
    "expired": (
        Reply(
            400,
            error("ExpiredToken", "The provided token has expired.", f"<Token-0>{SECRET}</Token-0>"),
        ),
        "the credentials have expired: 400 (ExpiredToken); get new ones",
    ),
    "signature": (
        Reply(
            403,
            error(
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided.",
                f"<AWSAccessKeyId>{SECRET}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign>",
            ),
        ),
        "the store refused the credentials: 403 (SignatureDoesNotMatch)",
    ),
    "clock": (
        Reply(
            403,
            error(
                "RequestTimeTooSkewed",
                "The difference between the request time and the current time is too large.",
            ),
        ),
        "the clock of this machine differs from the store's: 403 (RequestTimeTooSkewed)",
    ),
    "other": (
        Reply(400, error("InvalidRequest", "No such thing.", f"<Token-0>{SECRET}</Token-0>")),
        "the store refused it: 400 (InvalidRequest): No such thing.",
    ),
}
CALLS: dict[str, Callable[[str], object]] = {
    "load": lambda url: sw.load(nn.Linear(2, 2), url),
    "verify": sw.verify,
    "save": lambda url: sw.save(small_state(), url),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", REPLIES)
def test_a_refusal_is_one_sentence(proxy: Proxy, kind: str, call: str) -> None:
    """Also where the first request is HEAD, whose reply has no body."""
    reply, said = REPLIES[kind]
    proxy.reset(lambda asked: Do(reply=reply))
    with pytest.raises(ShardwiseError) as caught:
        CALLS[call](f"{ROOT}/refused")
    first = str(caught.value).partition("\n")[0]
    assert first.endswith(said) or f"failed: {said}" in first, first
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    assert "<" not in first
    assert len(proxy.log) <= 6


def test_a_body_is_not_repeated() -> None:
    """It may hold a token, or what was signed."""
    said = f"GET http://h/x in 1ms, after 8 retries: {error('Odd', 'No.', f'<Token-0>{SECRET}</Token-0>')}"
    assert text_of(ValueError(said)) == "GET http://h/x in 1ms, after 8 retries:"


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_host(call: str) -> None:
    sw.configure_storage(
        "s3://nameless",
        endpoint="http://does-not-exist.invalid",
        region="us-east-1",
        access_key_id="AKID",
        secret_access_key=SECRET,
        retry_config={"max_retries": 1},
    )
    with pytest.raises((SourceError, CheckpointError)) as caught:
        CALLS[call]("s3://nameless/x")
    said = "no reply from http://does-not-exist.invalid in 2 tries: its name is unknown; see the endpoint"
    assert said in str(caught.value)


def test_an_endpoint_where_nothing_listens() -> None:
    sw.configure_storage(
        "s3://silent",
        endpoint="http://127.0.0.1:9",
        skip_signature=True,
        retry_config={"max_retries": 1},
    )
    with pytest.raises(SourceError, match=r"no reply from http://127\.0\.0\.1:9 in 2 tries: it refuses conn"):
        sw.verify("s3://silent/x")


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed"
)
def test_a_certificate_that_no_authority_signed(tmp_path: Path) -> None:
    """The server is openssl's own, so that both sides of the handshake are real."""
    names = [str(tmp_path / one) for one in ("key.pem", "cert.pem")]
    subject = ("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", names[0], "-out", names[1])
    subprocess.run([*made, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            for _ in range(8):
                try:
                    context.wrap_socket(listening.accept()[0], server_side=True).close()
                except (
                    OSError
                ):  # the client goes as soon as it sees the certificate; at the end, the listener does
                    continue

        threading.Thread(target=answer, daemon=True).start()
        options = {
            "skip_signature": True,
            "retry_config": {"max_retries": 1},
            "client_options": {"timeout": "5s"},
        }
        sw.configure_storage("s3://untrusted", endpoint=f"https://localhost:{port}", **options)
        with pytest.raises(SourceError, match=r"its certificate is not trusted \(SSL_CERT_FILE names"):
            sw.verify("s3://untrusted/x")


def test_a_file_where_a_directory_is_expected(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    server.put("bad/config.json", b"{}")
    url = f"{ROOT}/bad/config.json"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = nn.Linear(2, 2)
    for call, said in (
        (lambda: sw.load(model, url), "contains no weights; give its directory"),
        (lambda: sw.load_pretrained(url, None), "contains no weights; give its directory"),
        (lambda: sw.plan(url, ranks=2), "contains no weights; give its directory"),
        (lambda: sw.diff(url, url), "contains no weights; give its directory"),
        (lambda: sw.load(model, f"{url}/x"), "no such file or directory"),
        (lambda: sw.verify(url), "is a file, not a directory"),
        (lambda: sw.restore(small_state(), url), "is a file, not a directory"),
        (lambda: sw.copy_checkpoint(url, tmp_path / "out"), "is a file; give its directory"),
    ):
        with pytest.raises(SourceError, match=said) as caught:
            call()
        assert url in str(caught.value)


def test_a_checkpoint_is_not_written_over_a_file(proxy: Proxy, server: S3Server, tmp_path: Path) -> None:
    server.put("bad/file", b"1")
    torch.save({}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="bad/file"):
        sw.save(small_state(), f"{ROOT}/bad/file")
    with pytest.raises(CheckpointError, match="bad/file"):
        sw.copy_checkpoint(tmp_path, f"{ROOT}/bad/file")


@pytest.mark.parametrize("listed", ["rights%2F", "rights%2Fa%2F"])
def test_who_may_list_a_prefix_alone(proxy: Proxy, server: S3Server, listed: str) -> None:
    """S3 tells them 403 of an object that is not there; a listing that they may see tells more."""
    server.put("rights/a/model.safetensors", (8).to_bytes(8, "little") + b"{}      ")
    proxy.reset(
        lambda asked: (
            Do(status=403)
            if asked.method == "HEAD" or ("prefix=" in asked.path and f"prefix={listed}" not in asked.path)
            else None
        )
    )
    assert not is_file(f"{ROOT}/rights/a")
    assert open_catalog(f"{ROOT}/rights/a").files[0].version
    with pytest.raises(SourceError, match="403"):
        is_file(f"{ROOT}/rights/a/model.safetensors")
