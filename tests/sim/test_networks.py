# SPDX-License-Identifier: Apache-2.0
"""Networks as text: what is shown is what is typed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra import Simulated
from orchestra.cli.options import NETWORK
from orchestra.worlds.simulated.networks import Host, Network, parse


@pytest.mark.parametrize(
    "text",
    ["100mbit,1ms", "10gbit,50us,5us", "100mbit,1ms racks:4x8", "2.5gbit", "1gbit,0s,0.3ms racks:3x1.5", NETWORK],
)
def test_a_network_is_shown_as_it_is_typed(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize("ways", [("1gbit,0.05ms", "1000mbit,50us"), ("100kbps,0.3ms,5us", "0.1mbit/s,300us,5e-3ms")])
def test_the_same_in_other_units_is_the_same(ways: tuple[str, str]) -> None:
    assert parse(ways[0]) == parse(ways[1])


@pytest.mark.parametrize("text", ["1..5gbit", "1e99999gbit", ".gbit", "1gbit,e5s", "1gbit racks:4x1.2.3", "-1gbit"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (rate|time) such as|is not racks:HOSTS"):
        parse(text)


def test_the_network_that_is_meant_where_none_is_typed() -> None:
    assert str(Simulated().network) == NETWORK


ABOVE_0 = st.floats(0, exclude_min=True, allow_infinity=False)
SECONDS = st.floats(0, 1e300)


@given(rate=ABOVE_0, latency=SECONDS, message=SECONDS, racks=st.none() | st.tuples(st.integers(1), ABOVE_0))
@settings(max_examples=200, deadline=None)
def test_what_is_shown_is_read_as_the_same(
    rate: float, latency: float, message: float, racks: tuple[int, float] | None
) -> None:
    host = Host(up=rate, down=rate, latency=latency, message=message)
    rack, times = racks or (None, 1.0)
    network = Network(hosts=(host,), rack=rack, oversubscription=times)
    assert parse(str(network)) == network


def test_a_network_that_cannot_be_typed_is_told_in_short() -> None:
    near, far = Host(up=1e9, down=1e9, latency=1e-4), Host(up=2e7, down=1e8, message=5e-6, number=1e-9, keeps=128e3)
    assert str(Network(hosts=(near, near, far), rack=2, oversubscription=4)) == (
        "2 x 1gbit,0.2ms; 20mbit/100mbit,0s,5us number:1ns keeps:128kB racks:2x4"
    )
    many = Network(hosts=(near, far) * 30)
    assert str(many).startswith("60 hosts, 1gbit,0.2ms and others (")
    assert str(many) != str(Network(hosts=(near, far) * 29 + (near, near))), "not the same condition"
    wrong = Network(hosts=(Host(up=0.0, down=math.nan, latency=-1.0),))
    assert str(wrong) == repr(wrong)
    assert [(problem.where[-7:], problem.message[-7:]) for problem in wrong.problems()] == [
        ("s[0].up", "above 0"), ("0].down", "above 0"), ("latency", "least 0"),
    ]  # fmt: skip
    assert [*Network(hosts=(near, far)).problems()] == [], "but for the rates all may be 0"
