"""What a phone says of itself, for checking a plan against it. In: a phone's name. Out: its status, now or as it told it last."""

from __future__ import annotations

import contextlib
import time

from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf import json_format

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import OutsideError, open_db, say
from bmoe_collector.fleet.names import find_phone, known_devices
from bmoe_collector.host import HostHome
from bmoe_collector.reach.routes import best_routes
from bmoe_collector.reach.states import state_of
from bmoe_collector.store.engine import Store


def status_of(device: str, db: str | None) -> pb.StatusReply:
    """Ask a phone; of one that is away what it told this database last, which is said.

    Raises:
        UserError: no such phone is paired.
        OutsideError: it does not answer and never told; says in which state it is.
    """
    host = HostHome()
    with contextlib.closing(open_db(db)) as store, reach_for(host, store.store_id, [device]) as reach:
        sightings = reach.sightings()
        uuid = find_phone(store, host, device, sightings)
        why = "away"
        for route in best_routes(sightings).get(uuid, []):
            try:
                with contextlib.closing(reach.open(route)) as client:
                    status = client.status()
            except Exception as error:
                why = ": ".join(state_of(error))
                continue
            if status.models or status.gates:
                return status
            why = f"it is {status.state}"  # it does not look at its sensors then
        return _recorded(store, uuid, device, why)


def _recorded(store: Store, uuid: bytes, device: str, why: str) -> pb.StatusReply:
    facts = known_devices(store).get(uuid.hex(), {}).get("facts") or {}
    offers = facts.get("offers")
    if not offers:
        raise OutsideError(f"{device}: {why}; leave --device out to check the plan alone")
    status = json_format.ParseDict(offers["status"], pb.StatusReply(), ignore_unknown_fields=True)
    status.device.name = str(facts.get("name") or device)
    ago_h = (time.time_ns() - offers["wall_ns"]) / 3.6e12
    say(f"{device}: {why}: the plan is checked against what it told {ago_h:.1f} h ago")
    return status
