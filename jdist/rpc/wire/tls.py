"""TLS between machines, with the user's certificates or self-signed ones.

The certificate's hash enters the handshake's proofs (`jdist.rpc.wire.handshake`), so a
certificate without a signature is as good against a man in the middle as one of a
certificate authority: a man in the middle shows another one, and the proofs differ.

TLS is done in memory, over the same blocking socket as the plain stream. Python's TLS
sockets would need a timeout of their own, and may not be read by one thread while
another writes.
"""

import dataclasses
import datetime
import hashlib
import os
import ssl
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from jdist._errors import Unavailable, check_type, extra
from jdist.rpc.base.errors import AuthenticationError
from jdist.rpc.wire.channel import ChannelClosed, NotSent
from jdist.rpc.wire.stream import CutOff, Pieces, Stream

FIRST_BYTE = b"\x16"
"""First byte of a TLS connection; jdist's own handshake begins with a "j"."""

_RECORD = 1 << 14  # TLS never encrypts more at once
_BATCH = 16 * _RECORD


@dataclasses.dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates for connections between machines.

    Attributes:
      certfile: This worker's certificate chain, PEM. Empty: a self-signed certificate
        is made at start, which needs the package `cryptography`.
      keyfile: Its private key, PEM; empty when `certfile` contains it.
      cafile: Authorities, PEM. When given, both sides must show a certificate signed
        by one of them. The cluster's key must be proved all the same. Host names are
        not compared: the proof covers the very certificate and the worker's name.

    Raises:
      TypeError: One is no path.
      ValueError: A key or authorities without a certificate.
    """

    certfile: str | os.PathLike[str] = ""
    keyfile: str | os.PathLike[str] = ""
    cafile: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        for name in ("certfile", "keyfile", "cafile"):
            argument, path = f"TlsConfig({name}=...)", getattr(self, name)
            check_type(argument, path, str | os.PathLike, "must be the path of a file")
        if not self.certfile and (self.keyfile or self.cafile):
            raise ValueError(
                "`TlsConfig(certfile=...)` must be given with a keyfile or a cafile. "
                "Got none. A self-signed certificate needs none of the three."
            )


class Credentials:
    """One worker's TLS contexts, and the hash of its certificate.

    Args:
      config: Where the certificates are.

    Attributes:
      listener: Context for accepted connections.
      connector: Context for connections made.
      fingerprint: SHA-256 of this worker's certificate.

    Raises:
      Unavailable: A certificate has to be made and `cryptography` is not installed.
      OSError, ssl.SSLError: The files cannot be read or do not belong together.
    """

    def __init__(self, config: TlsConfig) -> None:
        self.listener = _context(ssl.PROTOCOL_TLS_SERVER)
        self.listener.num_tickets = 0  # no resumption: every connection proves itself
        self.connector = connector_context()
        if not config.certfile:
            self.fingerprint = _load_self_signed(self.listener)
            return
        for context in (self.listener, self.connector):
            context.load_cert_chain(config.certfile, config.keyfile or None)
            if config.cafile:
                context.load_verify_locations(config.cafile)
                context.verify_mode = ssl.CERT_REQUIRED
        certificate = Path(config.certfile).read_text()
        begin = certificate.index("-----BEGIN CERTIFICATE-----")
        end = certificate.index("-----END CERTIFICATE-----") + 25
        self.fingerprint = _hash(ssl.PEM_cert_to_DER_cert(certificate[begin:end]))


def connector_context() -> ssl.SSLContext:
    """Make a context that accepts any certificate."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate's hash enters the handshake's proofs, which refuse a wrong one.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsStream:
    """An encrypted byte stream over a `Stream`, with its `send` and `receive_into`.

    Args:
      stream: The connected stream. Its owner closes it, not this class.
      context: The TLS context of this side.
      is_listener: Which side this is.
      deadline: For TLS's own handshake, which is done here.

    Raises:
      AuthenticationError: The certificate is not accepted, by either side.
      ChannelClosed, TimeoutError: As `Stream.receive_into`.
    """

    def __init__(
        self,
        stream: Stream,
        context: ssl.SSLContext,
        is_listener: bool,
        deadline: float | None,
    ) -> None:
        self._stream = stream
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, is_listener)
        self._lock = threading.Lock()
        self._cipher = memoryview(bytearray(_BATCH))
        self._handshake(deadline)

    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the certificate that the other side showed."""
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is None:
            raise AuthenticationError("The listener showed no TLS certificate.")
        return _hash(certificate)

    def receive_into(
        self, view: memoryview, deadline: float | None, whole: bool = False
    ) -> int:
        """Waits for at least one byte; see `Stream.receive_into`."""
        while True:
            try:
                with self._lock:
                    got = self._tls.read(len(view), view)
            except ssl.SSLWantReadError:
                self._feed(deadline)
                continue
            except ssl.SSLError as error:
                raise ChannelClosed(f"its TLS connection broke ({error})") from error
            if not got:
                raise ChannelClosed("its connection closed")
            return int(got)

    def send(
        self, pieces: Pieces, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        """Encrypts and sends all pieces in order; see `Stream.send`."""
        begun = False
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                # For the encryption alone: a send that blocks must not keep the reader
                # waiting.
                with self._lock:
                    self._tls.write(rest[:_BATCH])
                    cipher = self._to_send.read()
                rest = rest[_BATCH:]
                try:
                    self._stream.send([cipher], deadline)
                except TimeoutError as error:
                    # A record that was encrypted must be sent, or the peer cannot
                    # decrypt the following ones.
                    raise CutOff(str(error)) from error
                except NotSent as error:
                    raise (ChannelClosed if begun else NotSent)(str(error)) from error
                begun = True

    def _handshake(self, deadline: float | None) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._feed(deadline)
                continue
            except ssl.SSLError as error:
                self._flush(deadline)  # the alert, which tells the other side why
                raise AuthenticationError(f"TLS was refused: {error}.") from error
            self._flush(deadline)
            return

    def _feed(self, deadline: float | None) -> None:
        got = self._stream.receive_into(self._cipher, deadline)
        with self._lock:
            self._received.write(self._cipher[:got])

    def _flush(self, deadline: float | None) -> None:
        if self._to_send.pending:
            self._stream.send([self._to_send.read()], deadline)


ByteStream = Stream | TlsStream
"""What sends and receives: a socket, or TLS over one."""


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _hash(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _load_self_signed(context: ssl.SSLContext) -> bytes:
    """Make and load a self-signed certificate; return its hash."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise Unavailable(
            "A self-signed TLS certificate needs the package `cryptography`: "
            f"`{extra('tls')}`. Or give certificates of your own, "
            "`tls=TlsConfig(certfile, keyfile)`."
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jdist worker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ by less than a day, and no run takes ten years.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    pem += key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # Python loads keys from files only. The folder is the user's own, and gone at once.
    with tempfile.TemporaryDirectory(prefix="jdist-") as folder:
        path = Path(folder) / "certificate.pem"
        # Private before the key is written into it.
        path.touch(mode=0o600)
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return _hash(certificate.public_bytes(serialization.Encoding.DER))
