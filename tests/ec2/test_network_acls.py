"""What network ACLs let through is what their rules say port by port."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ec2.renter.network_acls import Rules, acl_of
from tests.ec2.test_plan_doctor import rule

PORTS = st.integers(0, 40)
SPANS = st.tuples(PORTS, PORTS).map(lambda pair: (min(pair), max(pair)))
RULES = st.lists(
    st.builds(
        lambda number, action, egress, ports, of: rule(number, action, egress=egress, ports=ports, of=of),
        st.integers(1, 300),
        st.sampled_from(["allow", "deny"]),
        st.booleans(),
        SPANS,
        st.sampled_from(["0.0.0.0/0", "10.0.0.0/8", "52.216.0.0/15"]),
    ),
    max_size=8,
    unique_by=lambda one: (one["RuleNumber"], one["Egress"]),
)
LAST = [rule(32767, "deny", egress=False), rule(32767, "deny", egress=True)]


def decides(rules: list[dict[str, Any]], port: int, egress: bool) -> dict[str, Any]:
    """The rule for a port: what is for some public addresses decides only where it allows."""
    return next(
        one
        for one in sorted(rules, key=lambda one: int(one["RuleNumber"]))
        if one["Egress"] == egress
        and ("PortRange" not in one or one["PortRange"]["From"] <= port <= one["PortRange"]["To"])
        and one["CidrBlock"] in ("0.0.0.0/0", *(["52.216.0.0/15"] if one["RuleAction"] == "allow" else []))
    )


@given(RULES, SPANS, st.booleans())
def test_a_port_that_is_kept_out_is_found_wherever_it_is(
    rules: list[dict[str, Any]], span: tuple[int, int], egress: bool
) -> None:
    acl = {"NetworkAclId": "acl-1", "Entries": [*rules, *LAST], "Associations": []}
    deciding = [decides([*rules, *LAST], port, egress) for port in range(span[0], span[1] + 1)]
    denying = [one["RuleNumber"] for one in deciding if one["RuleAction"] == "deny"]
    found = Rules.of(acl, egress=egress)
    assert found.denying(*span) == (denying[0] if denying else None)
    free = found.free_before(32767)
    assert 0 < free < 32767
    assert free not in {one["RuleNumber"] for one in rules if one["Egress"] == egress}


def test_rules_of_ipv6_and_other_protocols_decide_nothing() -> None:
    ipv6 = {"RuleNumber": 1, "RuleAction": "deny", "Egress": True, "Protocol": "-1", "Ipv6CidrBlock": "::/0"}
    udp = {**rule(2, "deny", egress=True, ports=(443, 443)), "Protocol": "17"}
    acl = {"NetworkAclId": "acl-1", "Entries": [ipv6, udp, rule(3, egress=True), *LAST], "Associations": []}
    assert Rules.of(acl, egress=True).denying(443, 443) is None


def test_a_subnets_acl_is_the_one_that_is_linked_to_it() -> None:
    acls = [{"NetworkAclId": name, "Associations": [{"SubnetId": f"subnet-{name}"}]} for name in ("a", "b")]
    assert acl_of("subnet-b", acls) == acls[1]
    assert acl_of("subnet-c", acls) is None
