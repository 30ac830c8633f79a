"""Certificates of the user's own authorities, beside the cluster's key."""

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from jdist.rpc.base.errors import AuthenticationError
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.tls import Credentials, TlsConfig
from tests.rpc.sockets import KEY, call, echo, nothing_left, soon


@pytest.fixture(autouse=True)
def _leaks_nothing():
    with nothing_left():
        yield


class _Authority:
    """A certificate authority of this test, which signs for workers."""

    def __init__(self, folder):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(folder.name)
        self._certificate = self._sign(self._name, self._key.public_key(), ca=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(self._certificate))

    def issue(self, name):
        """Files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name), key.public_key(), ca=False)
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(_pem(certificate) + _pem(self._certificate))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _sign(self, name, public_key, ca):
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder(self._name, name, public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), True)
            .sign(self._key, hashes.SHA256())
        )


def _name(text):
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def authority(tmp_path):
    (tmp_path / "trusted").mkdir()
    return _Authority(tmp_path / "trusted")


@pytest.fixture
def impostor(tmp_path):
    (tmp_path / "impostor").mkdir()
    return _Authority(tmp_path / "impostor")


def test_certificates_of_an_authority(authority):
    """Each worker shows its own, and both are checked."""
    one, two = (
        TlsConfig(*authority.issue(name), authority.file) for name in ("one", "two")
    )
    with (
        SocketTransport("one", KEY, tls=one) as here,
        SocketTransport("two", KEY, tls=two) as there,
    ):
        there.serve(echo)
        channel = here.connect("two", there.address[:2], soon())
        assert channel.exchange(call(1), soon()).id == 1
        assert channel._stream.peer_fingerprint() == there._credentials.fingerprint


def test_certificates_of_another_authority(authority, impostor):
    """Refused on either side, although the key is right."""
    good = TlsConfig(*authority.issue("good"), authority.file)
    bad = TlsConfig(*impostor.issue("bad"), impostor.file)
    unchecked = TlsConfig(*impostor.issue("lax"))
    with SocketTransport("good", KEY, tls=good) as here:
        here.serve(echo)
        for config in (bad, unchecked):
            with SocketTransport("bad", KEY, tls=config) as there:
                there.serve(echo)
                with pytest.raises(AuthenticationError, match="TLS was refused"):
                    here.connect("bad", there.address[:2], soon())
                with pytest.raises(AuthenticationError, match="TLS was refused"):
                    there.connect("good", here.address[:2], soon())


def test_a_key_of_another_certificate(authority):
    """The files do not belong together."""
    certificate, _ = authority.issue("one")
    _, key = authority.issue("two")
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        Credentials(TlsConfig(certificate, key))


def test_the_certificate_of_a_self_signer_is_its_own():
    """Two workers never share one, and no file is left."""
    one, two = Credentials(TlsConfig()), Credentials(TlsConfig())
    assert one.fingerprint != two.fingerprint
