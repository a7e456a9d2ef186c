"""What a phone says of itself, for checking a plan against it. In: a phone's name. Out: its status."""

from __future__ import annotations

import contextlib

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.commands.pairing import reach_for
from bmoe_collector.common import OutsideError, open_db
from bmoe_collector.fleet.names import find_phone
from bmoe_collector.host import HostHome
from bmoe_collector.reach.routes import best_routes
from bmoe_collector.reach.states import state_of


def status_of(device: str, db: str | None) -> pb.StatusReply:
    """Ask a phone.

    Raises:
        UserError: no such phone is paired.
        OutsideError: it does not answer; says in which state it is.
    """
    host = HostHome()
    with contextlib.closing(open_db(db)) as store, reach_for(host, store.store_id, [device]) as reach:
        sightings = reach.sightings()
        uuid = find_phone(store, host, device, sightings)
        why = "away"
        for route in best_routes(sightings).get(uuid, []):
            try:
                with contextlib.closing(reach.open(route)) as client:
                    return client.status()
            except Exception as error:
                why = ": ".join(state_of(error))
    raise OutsideError(f"{device}: {why}; leave --device out to check the plan alone")
