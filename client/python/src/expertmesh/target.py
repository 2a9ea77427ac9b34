"""From the addresses a user writes to a gRPC channel over all of them."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
from typing import Any

import grpc

from .error import Error

_LOGGER = logging.getLogger("expertmesh")
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:/,\s]+)):(?P<port>\d{1,5})")
_EXPECTED = "expected HOST:PORT[,HOST:PORT...] or unix:PATH"

# These, and the retries below, are the same in common/rpc/channel.cc.
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
#: How long one attempt to connect may take; gRPC calls this the minimal back-off.
_CONNECT_TIMEOUT_MS = 5_000
#: What gRPC's options hold at most.
MAX_INT = 2**31 - 1


def channel_target(address: str, *, resolve: bool = True) -> str:
    """The gRPC target of `address`.

    One address is left to gRPC's resolver. Several are resolved here, because gRPC has no target that lists
    host names; those that cannot be resolved are left out as long as one can.

    Throws Error: INVALID_ARGUMENT if `address` is malformed, UNAVAILABLE if no host name can be resolved.
    `resolve=False` only checks the form.
    """
    if address.startswith("unix:"):
        if len(address) == len("unix:") or "," in address:
            raise _malformed(address)
        return address
    pairs = [_parsed(address, part.strip()) for part in address.split(",")]
    if not resolve:
        return ""
    if len(pairs) == 1:
        host, port = pairs[0]
        return f"dns:///[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"
    endpoints = [endpoint for host, port in pairs for endpoint in _resolved(host, port)]
    if not endpoints:
        raise Error(grpc.StatusCode.UNAVAILABLE, f"none of the host names of {address} can be resolved")
    if all(ip.version == 4 for ip, _ in endpoints):
        return "ipv4:" + ",".join(f"{ip}:{port}" for ip, port in endpoints)
    # One target has one family: IPv4 addresses are written in their IPv6-mapped form.
    return "ipv6:" + ",".join(
        f"[{ip if ip.version == 6 else f'::ffff:{ip}'}]:{port}" for ip, port in endpoints
    )


def channel_options(address: str, max_message_bytes: int) -> list[tuple[str, Any]]:
    service_config = {
        "loadBalancingConfig": [{"round_robin" if "," in address else "pick_first": {}}],
        "methodConfig": [
            {
                "name": [{"service": "expertmesh.v1.MoeService"}],
                # Every call of the service is idempotent. UNAVAILABLE is what gRPC makes of a connection that
                # was lost, and of a router that is stopping. A router that means its UNAVAILABLE says so by
                # grpc-retry-pushback-ms: -1, and gRPC returns it at once.
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
    return [
        ("grpc.service_config", json.dumps(service_config)),
        # gRPC retries no message that is larger than this buffer, 256 KiB by default.
        ("grpc.per_rpc_retry_buffer_size", min(max_message_bytes + (64 << 10), MAX_INT)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A forked child must not find the connection of its parent in a pool.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def _parsed(address: str, part: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(part)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise _malformed(address)
    return match["six"] or match["host"], int(match["port"])


def _malformed(address: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, f"address: {_EXPECTED}, given {address!r}")


def _resolved(host: str, port: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Its IPv4 addresses, or the IPv6 ones where it has no other: both would count one router twice."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        _LOGGER.warning("router %s:%d is left out: %s", host, port, error)
        return []
    ips = {ipaddress.ip_address(str(entry[4][0])) for entry in found}
    preferred = {ip for ip in ips if ip.version == 4} or ips
    return [(ip, port) for ip in sorted(preferred, key=str)]
