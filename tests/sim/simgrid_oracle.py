# SPDX-License-Identifier: Apache-2.0
"""When flows among ten hosts of 1 MB/s end, by SimGrid's CM02 model. Reads `TIME SOURCE TO BYTES` lines."""

from __future__ import annotations

import sys

sys.path.append("/usr/lib/python3/dist-packages")  # where Debian's python3-simgrid is
try:
    from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor
except ImportError:
    if __name__ == "__main__":
        sys.exit(77)
    raise  # to tools that only look for doctests

HOSTS, RATE = 10, 1e6


def main() -> None:
    wishes = [line.split() for line in sys.stdin]
    settings = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0")
    engine = Engine([sys.argv[0], "--log=root.thres:error", *(f"--cfg={setting}" for setting in settings)])
    zone = NetZone.create_star_zone("zone")
    hosts = []
    for i in range(HOSTS):
        host = zone.create_host(f"host-{i}", 1e9)
        link = zone.create_split_duplex_link(f"link-{i}", RATE).set_latency(0).seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.Direction.UP)], True)
        hosts.append(host)
    zone.seal()
    ends = [0.0] * len(wishes)

    def send(i: int) -> None:
        this_actor.sleep_until(float(wishes[i][0]))
        Mailbox.by_name(f"box-{i}").put(i, int(float(wishes[i][3])))

    def receive(i: int) -> None:
        Mailbox.by_name(f"box-{i}").get()
        ends[i] = Engine.clock

    for i, (_, source, to, _) in enumerate(wishes):
        Actor.create(f"send-{i}", hosts[int(source)], send, i)
        Actor.create(f"receive-{i}", hosts[int(to)], receive, i)
    engine.run()
    print("\n".join(repr(end) for end in ends))


if __name__ == "__main__":
    main()
