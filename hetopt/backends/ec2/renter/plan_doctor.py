"""Whether a plan can be launched, asked of AWS before anything is rented: each check is a sentence and a way out.

Calls that EC2 can only check (``DryRun``) are tried with the caller's own credentials; what cannot be tried, because it
needs a thing that is there or because S3 and IAM know no such thing, is simulated where the caller may do that. Nothing
is made or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import account
from hetopt.backends.ec2.renter.authorizations import Asked, Place, authorizations
from hetopt.backends.ec2.renter.bucket_doctor import bucket_checks
from hetopt.backends.ec2.renter.calls import fleet_call, machine_settings, template_step
from hetopt.backends.ec2.renter.doctor import Check, Verdict, bad, quota_checks, role_checks, try_only
from hetopt.backends.ec2.renter.edge import Login
from hetopt.backends.ec2.renter.errors import ApiRefused
from hetopt.backends.ec2.renter.order import Order, Role
from hetopt.backends.ec2.renter.ordering import Orders, check_prices, expected_usd, moved_prices, roles_of
from hetopt.backends.ec2.renter.permissions import Policy, give_policy, node_policy
from hetopt.backends.ec2.renter.request import Request, read
from hetopt.backends.ec2.renter.ways_out import ways_by_zone
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused, HetoptError
from hetopt.core.formatting import duration, usd
from hetopt.optimizer.plan import Plan

LEAST_LOGIN_S = 1200.0
"""Renting, booting and the first looks: credentials that end before cannot see a run begin."""

_OWN_KEY_AGAIN = "aws ec2 reset-ebs-default-kms-key-id"


@dataclass(frozen=True, kw_only=True)
class PlanDoctor(Orders):
    """Asks what a plan needs, and writes the order that a launch would.

    Attributes:
        login: where the credentials came from, and until when they hold.
        now_s: seconds since the epoch.
    """

    login: Callable[[], Login]
    now_s: float

    def checks(self, plan: Plan) -> Iterator[Check]:
        """One after another, from what needs no call to what needs an order."""
        yield self._age(plan)
        yield self._login(plan)
        try:
            roles = roles_of(plan, self.catalog, self.wishes.substitutes)
        except BadInput as refused:
            yield bad("types", refused)
            return
        yield from role_checks(self.edge, self.catalog, roles, plan.chosen.disk_gb, self.wishes.images)
        yield from self._service_roles(roles)
        yield self._disk_key(roles)
        try:
            order = self.of_plan(plan, run_id="doctor", bundle_sha256="0" * 64, now_s=self.now_s)
        except HetoptError as refused:
            yield bad("budget" if isinstance(refused, BudgetStop) else "zones", refused)
            return
        yield self._zones(order)
        yield from self._ways_out(order)
        yield self._prices(plan, order)
        yield self._budget(plan, order)
        yield from self._move(order)
        yield from bucket_checks(self.edge, order)
        yield from self._renting(order)
        yield from self._simulated(order)
        yield self._simulated_of_machines(order)

    def _age(self, plan: Plan) -> Check:
        """Whether the catalogue has newer prices than the plan was made with."""
        older = []
        for group in plan.chosen.groups:
            try:
                known = self.catalog.price(group.instance_type, group.market)
            except BadInput:
                continue  # told by the types' own check
            if known is not None and str(known.date) > group.price_date:
                older.append(f"{group.instance_type} of {group.price_date}, now {known.date}")
        if older:
            said = f"it is older than the catalogue (prices: {'; '.join(older)}), so it may not be the best any more"
            return Check(name="plan", verdict="unknown", said=said, hint=f"make it again with `{Plan.MADE_BY}`")
        return Check(name="plan", verdict="good", said="it was made with the newest prices that the catalogue has")

    def _login(self, plan: Plan) -> Check:
        """Whether the credentials last: who follows a run grants it time."""
        login, name = self.login(), "login"
        renew = "log in again first: `aws sso login --profile NAME`, or what gave you these credentials"
        if login.end_s is None:
            verdict: Verdict = "unknown" if login.is_temporary else "good"
            when = "end at some time that they do not tell" if login.is_temporary else "do not end"
            said = f"the credentials (from {login.source}) {when}"
            return Check(name=name, verdict=verdict, said=said, hint=renew if login.is_temporary else None)
        left_s, longest_s = login.end_s - self.now_s, plan.chosen.prediction.total_s.high
        said = f"the credentials end in {duration(max(0.0, left_s))}"
        if left_s < LEAST_LOGIN_S:
            return Check(name=name, verdict="bad", said=f"{said}, before a run has begun", hint=renew)
        if left_s < longest_s:
            said += f", and the run may take {duration(longest_s)}: nobody grants it more time after that"
            return Check(name=name, verdict="unknown", said=said, hint=renew)
        return Check(name=name, verdict="good", said=said)

    def _service_roles(self, roles: Sequence[Role]) -> Iterator[Check]:
        """EC2's own roles, which its first spot machine and its first fleet need."""
        rents_spot = any(role.market == "spot" for role in roles)
        for role, service in facts.SERVICE_ROLES.value.items():
            if role == facts.SPOT_ROLE.value and not rents_spot:
                continue
            name, command = f"role {role}", f"aws iam create-service-linked-role --aws-service-name {service}"
            make = f"an administrator runs once: `{command}`"
            try:
                self.edge(read("iam", "get_role", "EC2's own role", RoleName=role))
            except ApiRefused as refused:
                absent = refused.code.startswith(facts.NO_ROLE.value)
                said = "the account has none" if absent else refused.message.rstrip(".")
                yield Check(name=name, verdict="bad" if absent else "unknown", said=said, hint=make)
            else:
                yield Check(name=name, verdict="good", said="is there")

    def _disk_key(self, roles: Sequence[Role]) -> Check:
        """Which key encrypts the disks, and whether spot machines may use it."""
        name = "disk encryption"
        try:
            key = str(self.edge(read("ec2", "get_ebs_default_kms_key_id", "the key of encrypted disks"))["KmsKeyId"])
        except CloudRefused as refused:
            return Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=refused.hint)
        if key.endswith(facts.OWN_DISK_KEY.value):
            return Check(
                name=name, verdict="good", said="disks are encrypted by AWS's own key, which everybody may use"
            )
        try:
            asked = read("kms", "describe_key", "whether the key of disks can be used", KeyId=key)
            state = str(self.edge(asked)["KeyMetadata"]["KeyState"])
        except CloudRefused:
            state = facts.KEY_SERVES.value  # as far as anybody here may know
        if state != facts.KEY_SERVES.value:
            going = f"`aws kms cancel-key-deletion --key-id {key}`, then " if state == facts.KEY_GOES.value else ""
            hint = f"{going}`aws kms enable-key --key-id {key}`, or go back to AWS's own: `{_OWN_KEY_AGAIN}`"
            said = f"disks are encrypted by {key}, which is {state}: machines would end as they begin"
            return Check(name=name, verdict="bad", said=said, hint=hint)
        if all(role.market == "on-demand" for role in roles):
            said = f"disks are encrypted by {key}, which you must be allowed to use"
            return Check(name=name, verdict="unknown", said=said, hint=f"`aws kms describe-key --key-id {key}`")
        role = account.role_arn(key.split(":")[4], facts.SPOT_ROLE.value)
        grant = (
            f"`aws kms create-grant --key-id {key} --grantee-principal {role} --operations "
            f"{' '.join(facts.DISK_KEY_OPERATIONS.value)}`, or put EC2 into the key's policy"
        )
        try:
            grants = self.edge(read("kms", "list_grants", "who may use the key of disks", KeyId=key))["Grants"]
        except CloudRefused as refused:
            said = f"disks are encrypted by {key}, and who may use it cannot be read ({refused.message.rstrip('.')})"
            return Check(name=name, verdict="unknown", said=said, hint=f"if spot machines may not: {grant}")
        if any(str(one.get("GranteePrincipal", "")).endswith(facts.SPOT_ROLE.value) for one in grants):
            return Check(name=name, verdict="good", said=f"disks are encrypted by {key}, which spot machines may use")
        said = f"disks are encrypted by {key}, which spot machines have no grant for: they would end as they begin"
        return Check(name=name, verdict="bad", said=said, hint=grant)

    def _zones(self, order: Order) -> Check:
        names = ", ".join(zone.name for zone in order.zones)
        return Check(name="zones", verdict="good", said=f"every type is offered in {names}, the cheapest first")

    def _ways_out(self, order: Order) -> Iterator[Check]:
        """Whether a machine in each zone's subnet reaches S3 and packages."""
        if order.network.proxy is not None:
            said = f"machines go by {order.network.proxy}, which only they can try"
            yield Check(name="network", verdict="unknown", said=said, hint="nothing needs to be done where it is right")
            return
        try:
            ways = ways_by_zone(self.edge, order)
        except CloudRefused as refused:
            yield Check(name="network", verdict="unknown", said=refused.message.rstrip("."), hint=refused.hint)
            return
        # What is the same of several zones in one sentence, with the way out of the first.
        reasons = {zone: None if why is None else why.said for zone, why in ways.items()}
        for reason in dict.fromkeys(reasons.values()):
            same = {zone: ways[zone] for zone in ways if reasons[zone] == reason}
            name = f"network in {', '.join(same)}"
            if reason is None:
                yield Check(name=name, verdict="good", said="it has a route to S3 and packages")
                continue
            hints = list(dict.fromkeys(one.hint for one in same.values() if one is not None))
            likewise = "; likewise in the others" if len(hints) > 1 else ""
            yield Check(name=name, verdict="bad", said=reason, hint=f"{hints[0]}{likewise}")

    def _prices(self, plan: Plan, order: Order) -> Check:
        """What machines cost now beside what was planned."""
        try:
            check_prices(plan, order)
        except BudgetStop as refused:
            return bad("prices", refused)
        moved = "; ".join(
            f"{one.instance_type} costs {usd(one.usd_per_hour)} an hour, planned with {usd(one.planned_usd_per_hour)}"
            for one in moved_prices(plan, order)
        )
        return Check(name="prices", verdict="good", said=moved)

    def _budget(self, plan: Plan, order: Order) -> Check:
        expected, high = expected_usd(plan, order)
        said = (
            f"the run should cost {usd(expected)}, and not above {usd(high)} in nine of ten; the budget of "
            f"{usd(order.budget_usd)} pays for {duration(order.lifetime_s)} at on-demand prices"
        )
        return Check(name="budget", verdict="good", said=said)

    def _move(self, order: Order) -> Iterator[Check]:
        """Whether the account may have the machines on demand that a run moves to before its deadline passes."""
        spot = [role.model_copy(update={"market": "on-demand"}) for role in order.roles if role.market == "spot"]
        for check in quota_checks(self.edge, self.catalog, spot) if order.move_usd else ():
            if check.verdict == "good":
                continue
            said = f"{check.said}: the run could not move to on-demand machines before its deadline"
            yield replace(check, name=f"deadline, {check.name}", verdict="unknown", said=said)

    def _renting(self, order: Order) -> Iterator[Check]:
        """Run each role's machines, only to be checked: with their image, disk, network and role, by every type."""
        zone = order.zones[0]
        for role, name in ((each, name) for each in order.roles for name in each.instance_types):
            market = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}
            parameters = {
                **machine_settings(order, role.image_kind),
                "InstanceType": name,
                "MinCount": role.machines,
                "MaxCount": role.machines,
                "SubnetId": zone.subnet_id,
                **({"InstanceMarketOptions": market} if role.market == "spot" else {}),
            }
            yield try_only(self.edge, "run_instances", parameters, of=name)
        for role in order.roles:
            yield try_only(self.edge, "create_fleet", _fleet(order, role), of=role.instance_types[0])

    def _simulated(self, order: Order) -> Iterator[Check]:
        """What IAM says of calls that nothing can be tried of: removing, handing over the role, objects."""
        who = account.identity(self.edge)
        place = Place(who=who, region=order.region, tags=order.tags.by_key(), role=order.instance_profile)
        asked = [one for request in _untried(order) for one in authorizations(request, place)]
        source = _policies_of(who.arn)
        name = "permissions, simulated"
        if source is None:
            said = f"IAM simulates no policies of {who.arn}"
            yield Check(name=name, verdict="unknown", said=said, hint="a launch tells which are missing")
            return
        denied: list[str] = []
        try:
            for resource, context, actions in _grouped(asked):
                denied += [*self._denied(source, actions, resource, context)]
        except ApiRefused as refused:
            hint = "nothing needs to be done: whoever may not ask IAM is told at launch"
            yield Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=hint)
            return
        if denied:
            hint = "an administrator allows it with the policy of `hetopt setup --print-policy`"
            yield Check(name=name, verdict="bad", said=f"denied: {', '.join(dict.fromkeys(denied))}", hint=hint)
        else:
            yield Check(name=name, verdict="good", said=f"{len({one.action for one in asked})} actions are allowed")

    def _simulated_of_machines(self, order: Order) -> Check:
        """What the machines' role lacks of the policy for it, such as what an earlier version did not ask for."""
        name = "machines' permissions, simulated"
        look = "look with `hetopt setup --print-policy` whether the role has the policy for machines"
        profile = read("iam", "get_instance_profile", "its role", InstanceProfileName=order.instance_profile)
        wanted = [one for one in node_policy(bucket=order.bucket)["Statement"] if one["Effect"] == "Allow"]
        try:
            roles = self.edge(profile)["InstanceProfile"]["Roles"]  # of a profile, IAM allows one role
            denied = [
                action
                for role in roles
                for one in wanted
                for resource in one["Resource"]
                for action in self._denied(role["Arn"], one["Action"], resource, _context_of(one))
            ]
        except ApiRefused as refused:
            return Check(name=name, verdict="unknown", said=refused.message.rstrip("."), hint=look)
        if not roles:
            return Check(name=name, verdict="unknown", said=f"{order.instance_profile} has no role", hint=look)
        if denied:
            said = f"{order.instance_profile} lacks {', '.join(dict.fromkeys(denied))}"
            give = give_policy(roles[0]["RoleName"])
            hint = f"an administrator gives it the policy of `hetopt setup --print-policy` again: `{give}`"
            return Check(name=name, verdict="bad", said=said, hint=hint)
        return Check(name=name, verdict="good", said=f"{order.instance_profile} has what machines do")

    def _denied(self, source: str, actions: Sequence[str], resource: str, context: Mapping[str, str]) -> Iterator[str]:
        entries = [
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
            for key, value in context.items()
        ]
        request = Request(
            step="simulate",
            service="iam",
            operation="simulate_principal_policy",
            parameters={
                "PolicySourceArn": source,
                "ActionNames": list(actions),
                "ResourceArns": [resource],
                "ContextEntries": entries,
            },
            purpose="whether the caller's policies allow it",
        )
        for result in self.edge(request)["EvaluationResults"]:
            if result["EvalDecision"] != facts.SIMULATED_AS_ALLOWED.value:
                organisation = result.get("OrganizationsDecisionDetail", {}).get("AllowedByOrganizations") is False
                yield f"{result['EvalActionName']}{' (by the organisation)' if organisation else ''}"


def _context_of(statement: Policy) -> Mapping[str, str]:
    """A request that a statement of the machines' policy allows: the first of the values that each key may have."""
    return {key: values[0] for keys in statement.get("Condition", {}).values() for key, values in keys.items()}


def _fleet(order: Order, role: Role) -> Mapping[str, object]:
    """The call for a role's fleet, by a template that is not there yet."""
    no_template = {template_step(role.image_kind): {"LaunchTemplateId": facts.NO_TEMPLATE.value}}
    return fleet_call(order, role, order.zones[0], attempt=0).resolved(no_template).parameters


def _untried(order: Order) -> Iterator[Request]:
    """Calls of every run that cannot be tried, about a thing of its own."""
    things = (
        ("terminate_instances", "InstanceIds", ["i-0"]),
        ("delete_fleets", "FleetIds", ["fleet-0"]),
        ("delete_launch_template", "LaunchTemplateId", "lt-0"),
        ("delete_security_group", "GroupId", "sg-0"),
        ("authorize_security_group_ingress", "GroupId", "sg-0"),
        ("authorize_security_group_egress", "GroupId", "sg-0"),
        ("revoke_security_group_egress", "GroupId", "sg-0"),
    )
    for operation, key, named in things:
        yield Request(step=operation, service="ec2", operation=operation, parameters={key: named}, purpose="")
    for operation in ("put_object", "get_object"):
        parameters = {"Bucket": order.bucket, "Key": f"{order.prefix}/order.json"}
        yield Request(step=operation, service="s3", operation=operation, parameters=parameters, purpose="")


def _grouped(asked: Sequence[Asked]) -> Iterator[tuple[str, Mapping[str, str], list[str]]]:
    """Questions about the same thing in one call."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for one in asked:
        groups.setdefault((one.resource, tuple(sorted(one.context.items()))), []).append(one.action)
    for (resource, context), actions in groups.items():
        yield resource, dict(context), actions


def _policies_of(arn: str) -> str | None:
    """Whose policies IAM can simulate: a user, or the role of a session; none of the account's root.

    The path of a role is not in the ARN of its sessions: roles with one are not found, which is told as unknown.
    """
    parts = arn.split(":")
    kind, _, name = parts[-1].partition("/")
    if kind == "assumed-role":
        return f"arn:aws:iam::{parts[4]}:role/{name.partition('/')[0]}"
    return arn if kind == "user" else None
