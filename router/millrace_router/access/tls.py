"""TLS of the HTTP port."""

from __future__ import annotations

import ssl
from typing import Any

from millrace_router.config import RouterConfig


class ListenerTlsError(Exception):
    """The files of the flags are missing or unusable."""


PLAIN_HTTP = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""OpenSSL's words for a first message that is no TLS but HTTP."""
SENTENCE = "This port speaks HTTPS: ask again with an address that begins with https://.\n"
ANSWER = (
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(SENTENCE)}\r\nConnection: close\r\n\r\n{SENTENCE}"
).encode()


class _Listener(ssl.SSLContext):
    """A context whose handshakes answer plain HTTP with a sentence, before they fail."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> ssl.SSLObject:
        handshake = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(handshake, _Handshake)
        handshake.outgoing = outgoing
        return handshake


class _Handshake(ssl.SSLObject):
    outgoing: ssl.MemoryBIO
    refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in PLAIN_HTTP:
                raise
            self.refusal = error
            self.outgoing.write(ANSWER)
            # The event loop writes what is outgoing only while the handshake goes on.
            raise ssl.SSLWantReadError from error


_Listener.sslobject_class = _Handshake


def listener_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the context of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs; None without them.

    With --ssl-ca-certs a client must present a certificate.

    Raises:
        ListenerTlsError: as above.

    """
    cert, key, ca = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        missing = "--ssl-certfile" if cert is None else "--ssl-keyfile"
        raise ListenerTlsError(f"HTTPS needs {missing} too")
    context = _Listener(ssl.PROTOCOL_TLS_SERVER)
    context.verify_flags = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).verify_flags
    try:
        # Without a password function OpenSSL asks the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:
        raise ListenerTlsError(f"{cert} and {key} cannot be used for HTTPS: {error}") from error
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ListenerTlsError(f"{ca} cannot be used for HTTPS: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
