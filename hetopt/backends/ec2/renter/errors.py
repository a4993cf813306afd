"""What each refusal of the cloud means: one line of cause, the next command to try, and whether trying again can help.

Each row says where its codes were read. The names of botocore's own exceptions stand for what goes wrong before a call
leaves this machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.request import Answer, Edge, Request
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.market.quota import quota_of

Reaction = Literal["again", "elsewhere", "passing", "stop"]
"""``again``: the same call, later. ``elsewhere``: another pool, at once; the same one has nothing for minutes.
``passing``: goes away by itself where the caller knows that. ``stop``: a person must do something."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """One row of the table. ``cause`` and ``hint`` may name what the call was about, see `_words`."""

    codes: tuple[str, ...]
    reaction: Reaction
    cause: str
    hint: str
    source: str


_EC2 = f"EC2 API reference, 'Error codes for the Amazon EC2 API', {facts.READ}"
_S3 = f"S3 API reference, 'Error responses', {facts.READ}"
_COMMON = f"common errors of the AWS query APIs (STS and IAM API references), {facts.READ}"
_BOTOCORE = "exceptions of botocore 1.44.5"

TABLE = (
    Meaning(
        codes=(
            "InsufficientInstanceCapacity",
            "UnfulfillableCapacity",
            "InsufficientHostCapacity",
            "InsufficientReservedInstanceCapacity",
            "InsufficientCapacity",
        ),
        reaction="elsewhere",
        cause="EC2 has no {types} to give in this zone right now",
        hint="wait some minutes, or plan with other types: `hetopt recommend PROFILE --exclude {types}`",
        source=_EC2
        + "; UnfulfillableCapacity in answers of fleets: aws-parallelcluster-node pull request 673, Karpenter",
    ),
    Meaning(
        codes=("InsufficientVolumeCapacity", "InsufficientAddressCapacity"),
        reaction="elsewhere",
        cause="this zone has no disk or no address left for {types} right now",
        hint="wait some minutes; or launch in another zone, `hetopt launch PLAN --on ec2 --zone ZONE`",
        source=_EC2 + "; aws-parallelcluster, failures of launches: InsufficientVolumeCapacity, 2026-11-28",
    ),
    Meaning(
        codes=("SpotMaxPriceTooLow",),
        reaction="elsewhere",
        cause="the spot price of {types} is above what EC2 accepts",
        hint="plan again at today's prices, or on demand: `hetopt recommend PROFILE --market on-demand`",
        source=_EC2,
    ),
    Meaning(
        codes=tuple(sorted(facts.OVER_QUOTA.value)),
        reaction="stop",
        cause="the quota for vCPUs is used up ({quota})",
        hint="ask for more: `aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
        "{quota_code} --desired-value N`; `hetopt doctor PLAN` says how many are needed, and machines that have just "
        "ended count for some minutes more",
        source=_EC2,
    ),
    Meaning(
        codes=(
            "SecurityGroupLimitExceeded",
            "VolumeLimitExceeded",
            "MaxFleetCountExceeded",
            "MaxSpotFleetRequestCountExceeded",
            "RulesPerSecurityGroupLimitExceeded",
        ),
        reaction="stop",
        cause="a limit of the account is reached ({code})",
        hint="remove what is left over with `hetopt gc --on ec2`, or ask for a higher limit at Service Quotas",
        source=_EC2 + "; MaxFleetCountExceeded: pkg/errors of aws/karpenter-provider-aws, 'fleet request quota'",
    ),
    Meaning(
        codes=(
            "RequestLimitExceeded",
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "RequestThrottled",
            "RequestThrottledException",
            "TooManyRequestsException",
            "SlowDown",
            "EC2ThrottledException",
            "CapacityNotAvailableError",
        ),
        reaction="again",
        cause="the account sends more requests than EC2 takes",
        hint="try again in a minute",
        source=_EC2 + "; the others: codes that botocore's standard mode takes for throttling",
    ),
    Meaning(
        codes=("InternalError", "InternalFailure", "InternalServerError", "ServiceUnavailable", "Unavailable", "50?"),
        reaction="again",
        cause="{service} has a fault of its own",
        hint="try again in some minutes; https://health.aws.amazon.com says more",
        source=_EC2,
    ),
    Meaning(
        codes=(
            "EndpointConnectionError",
            "ConnectTimeoutError",
            "ReadTimeoutError",
            "ConnectionClosedError",
            "ConnectionError",
            "RequestTimeout",
            "ResponseParserError",
            "HTTPClientError",
            "IncompleteReadError",
            "ChecksumError",
            "FlexibleChecksumError",
            "ResponseStreamingError",
        ),
        reaction="again",
        cause="{endpoint} cannot be reached",
        hint="look at the network and at AWS_ENDPOINT_URL and HTTPS_PROXY, then try again",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("ProxyConnectionError", "InvalidProxiesConfigError"),
        reaction="stop",
        cause="the proxy for AWS cannot be used: {text}",
        hint="look at HTTPS_PROXY and NO_PROXY, then try again",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("ValueError",),
        reaction="stop",
        cause="an address that is set for AWS is none: {text}",
        hint="AWS_ENDPOINT_URL and `endpoint_url` in ~/.aws/config begin with http:// or https://: correct them",
        source=_BOTOCORE.replace("exceptions", "what Endpoint raises besides exceptions"),
    ),
    Meaning(
        codes=("SSLError",),
        reaction="stop",
        cause="no secure connection to {endpoint} can be made",
        hint="look at HTTPS_PROXY and AWS_CA_BUNDLE, then try again",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("UnauthorizedOperation", "AccessDenied*"),
        reaction="stop",
        cause="these credentials may not do {action}: {text}",
        hint="an administrator allows it with the policy of `hetopt setup --print-policy`",
        source=_EC2,
    ),
    Meaning(
        codes=("TagPolicyViolation", "TagPolicyViolationException"),
        reaction="stop",
        cause="a tag policy of the organisation refuses what hetopt tags: {text}",
        hint="its administrators allow the keys that begin with hetopt: (`hetopt launch PLAN --on ec2 --dry-run "
        "--json` shows them), or use an account without that policy",
        source="runs-on/runs-on issue 485, of CreateFleet; Organizations user guide, 'Tag policies', 2026-11-27",
    ),
    Meaning(
        codes=("403", "Forbidden"),
        reaction="stop",
        cause="the bucket {bucket} belongs to somebody else, or these credentials may not use it",
        hint="name another `bucket`, or have it allowed by the policy of `hetopt setup --print-policy`",
        source=_S3,
    ),
    Meaning(
        codes=("AuthFailure.ServiceLinkedRoleCreationNotPermitted",),
        reaction="stop",
        cause="the account has never used {linked_name}, and these credentials may not create its service-linked role",
        hint="an administrator runs once: `aws iam create-service-linked-role --aws-service-name {linked_role}`",
        source="Karpenter's documentation, troubleshooting; EC2 user guide, 'Service-linked role for Spot Instances'",
    ),
    Meaning(
        codes=("OptInRequired",),
        reaction="stop",
        cause="the account cannot use this region",
        hint="enable the region in the account's settings, or plan again for another `region`",
        source=_EC2,
    ),
    Meaning(
        codes=("AuthFailure",),
        reaction="stop",
        cause="EC2 does not accept these credentials in this region: {text}",
        hint="check them with `aws sts get-caller-identity` and the clock with `hetopt doctor`; a region that is not "
        "enabled for the account answers the same",
        source=_EC2,
    ),
    Meaning(
        codes=("PendingVerification",),
        reaction="stop",
        cause="AWS is still verifying this account for the region",
        hint="wait for its e-mail, usually within minutes and at most four hours, then launch again",
        source=_EC2,
    ),
    Meaning(
        codes=("Blocked",),
        reaction="stop",
        cause="AWS has blocked this account: {text}",
        hint="ask at https://aws.amazon.com/support, and try `hetopt doctor PLAN` again when it is lifted; or use "
        "another account",
        source=_EC2,
    ),
    Meaning(
        codes=(
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "MetadataRetrievalError",
            "ConfigNotFound",
        ),
        reaction="stop",
        cause="there are no AWS credentials here",
        hint="run `aws configure` or `aws sso login --profile NAME`, and check with `aws sts get-caller-identity`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=(
            "ConfigParseError",
            "InvalidConfigError",
            "InvalidChecksumConfigError",
            "InvalidDefaultsMode",
            "InvalidEndpointConfigurationError",
            "InvalidEndpointDiscoveryConfigurationError",
            "InvalidIMDSEndpointError",
            "InvalidIMDSEndpointModeError",
            "InvalidMaxRetryAttemptsError",
            "InvalidRetryConfigurationError",
            "InvalidRetryModeError",
            "InvalidS3AddressingStyleError",
            "InvalidS3UsEast1RegionalEndpointConfigError",
            "InvalidSTSRegionalEndpointsConfigError",
            "InfiniteLoopConfigError",
            "UnknownCredentialError",
            "UnknownTokenProviderError",
        ),
        reaction="stop",
        cause="{text}",
        hint="correct ~/.aws/config, which `aws configure` writes anew, or the variable, then check with `aws sts "
        "get-caller-identity`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("ProfileNotFound",),
        reaction="stop",
        cause="{text}",
        hint="`aws configure list-profiles` tells which there are; choose one with AWS_PROFILE",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=(
            "ExpiredToken*",
            "TokenRetrievalError",
            "UnauthorizedSSOTokenError",
            "SSOTokenLoadError",
            "TokenRefreshRequired",
            "LoginAuthorizationCodeError",
            "LoginError",
            "LoginRefreshRequired",
            "LoginTokenLoadError",
            "NoAuthTokenError",
            "SSOError",
        ),
        reaction="stop",
        cause="the AWS session has expired",
        hint="run `aws sso login --profile NAME`, or `aws login` where you logged in so, and check with `aws sts "
        "get-caller-identity`",
        source=_COMMON + "; " + _BOTOCORE,
    ),
    Meaning(
        codes=("RefreshWithMFAUnsupportedError",),
        reaction="stop",
        cause="the session of a role that asks for a code (MFA) has ended, and only you can renew it",
        hint="get a new one, `aws sts get-session-token --serial-number DEVICE --token-code CODE`, then go on with "
        "`hetopt status`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("LoginInsufficientPermissions",),
        reaction="stop",
        cause="these credentials may not log in by `aws login`: {text}",
        hint="an administrator allows signin:CreateOAuth2Token; or log in by `aws sso login --profile NAME`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("MissingDependencyException",),
        reaction="stop",
        cause="the way that you log in by needs more of botocore: {text}",
        hint="install it: `pip install 'botocore[crt]'`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("RequestExpired",),
        reaction="stop",
        cause="the call is too old for EC2: the AWS session has expired, or the clock of this machine is wrong",
        hint="`aws sts get-caller-identity` fails where the session has expired: then `aws sso login --profile NAME`; "
        "else set the clock, `timedatectl set-ntp true`",
        source=f"{_COMMON}: 15 minutes after its date, or after its expiry, or before its date",
    ),
    Meaning(
        codes=(
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "InvalidAccessKeyId",
            "MissingAuthenticationToken",
        ),
        reaction="stop",
        cause="AWS does not know these credentials",
        hint="check them with `aws sts get-caller-identity`; regions that must be enabled first refuse all",
        source=_COMMON,
    ),
    Meaning(
        codes=("SignatureDoesNotMatch", "RequestTimeTooSkewed", "RequestInTheFuture"),
        reaction="stop",
        cause="the signature of the call was refused: the clock of this machine is wrong, or the secret key",
        hint="set the clock (`timedatectl set-ntp true`); `hetopt doctor` says how far it is off",
        source=_COMMON + "; RequestInTheFuture: clock skew codes of the AWS SDKs for Java and JavaScript",
    ),
    Meaning(
        codes=(
            "NoRegionError",
            "InvalidRegionError",
            "EndpointProviderError",
            "EndpointResolutionError",
            "EndpointVariantError",
            "ServiceNotInRegionError",
            "UnknownEndpointError",
            "UnknownFIPSEndpointError",
            "UnknownRegionError",
        ),
        reaction="stop",
        cause="no such region is known",
        hint="plan for a region that exists: `hetopt recommend PROFILE --region us-east-1`",
        source=_BOTOCORE,
    ),
    Meaning(
        codes=("Unsupported", "InvalidFleetConfig", "InvalidFleetConfiguration", "UnsupportedOperation"),
        reaction="elsewhere",
        cause="{types} cannot be started so in this zone: the type is not there, or does not fit the image",
        hint="plan with other types: `hetopt recommend PROFILE --exclude {types}`",
        source=_EC2 + "; InvalidFleetConfig: hashicorp/terraform-provider-aws issue 41272",
    ),
    Meaning(
        codes=("InsufficientFreeAddressesInSubnet",),
        reaction="elsewhere",
        cause="the subnet has no free addresses left",
        hint="remove what is left over with `hetopt gc --on ec2`, or name larger `subnets`",
        source=_EC2,
    ),
    Meaning(
        codes=("InvalidInstanceID.NotFound", "InvalidInstanceId"),
        reaction="passing",
        cause="EC2 does not know an instance: it is seconds old, or gone for an hour",
        hint="look again with `hetopt status` in a minute",
        source=_EC2,
    ),
    Meaning(
        codes=("DependencyViolation", "VolumeInUse", "InvalidGroup.InUse"),
        reaction="passing",
        cause="something that is still in use cannot be removed",
        hint="try again in a minute: `hetopt gc --on ec2 --remove`",
        source=_EC2,
    ),
    Meaning(
        codes=("InvalidGroup.Duplicate", "InvalidLaunchTemplateName.AlreadyExistsException"),
        reaction="stop",
        cause="the name is taken by something that does not belong to this run",
        hint="look at it with `hetopt gc --on ec2`, then launch again: every launch has a name of its own",
        source=_EC2,
    ),
    Meaning(
        codes=("ServiceQuotaExceededException",),
        reaction="stop",
        cause="the account has as many groups of schedules in this region as it may: {text}",
        hint="remove those of runs that are over with `hetopt gc --on ec2 --remove`",
        source="EventBridge Scheduler API reference, CreateScheduleGroup",
    ),
    Meaning(
        codes=("IdempotentParameterMismatch",),
        reaction="stop",
        cause="the same call was made before with other parameters, so the state of this run is not what it seems",
        hint="remove the run with `hetopt gc --on ec2 --remove`, then launch the plan anew",
        source=_EC2,
    ),
    Meaning(
        codes=("ConditionalRequestConflict", "OperationAborted", "409"),
        reaction="again",
        cause="somebody else wrote the same object at the same moment",
        hint="try again",
        source=_S3 + "; PutObject",
    ),
    Meaning(
        codes=("PreconditionFailed", "412"),
        reaction="stop",
        cause="somebody else holds this run",
        hint="look who follows it: `hetopt status`",
        source=_S3 + "; PutObject",
    ),
    Meaning(
        codes=("NoSuchBucket", "404"),
        reaction="stop",
        cause="the bucket {bucket} does not exist",
        hint="make it with `hetopt setup --create-bucket`, or name another `bucket`",
        source=_S3,
    ),
    Meaning(
        codes=("NoSuchKey",),
        reaction="stop",
        cause="the bucket {bucket} has no {key}",
        hint="look with `hetopt status`",
        source=_S3,
    ),
    Meaning(
        codes=("BucketAlreadyExists",),
        reaction="stop",
        cause="the bucket {bucket} belongs to somebody else",
        hint="choose another name for the `bucket`",
        source=_S3,
    ),
    Meaning(
        codes=("PermanentRedirect", "301", "IllegalLocationConstraintException", "AuthorizationHeaderMalformed"),
        reaction="stop",
        cause="the bucket {bucket} is in another region",
        hint="make one there with `hetopt setup --create-bucket --region REGION`, or name another `bucket`",
        source=_S3,
    ),
    Meaning(
        codes=("ParameterNotFound", "InvalidAMIID.*", "InvalidAMIName.*"),
        reaction="stop",
        cause="the region has no such machine image: {text}",
        hint="name one in `images`, or plan for another region; where the account allows some alone, `aws ec2 "
        "get-allowed-images-settings` tells which",
        source=_EC2 + "; Systems Manager API reference, GetParameter",
    ),
    Meaning(
        codes=(
            "InvalidIamInstanceProfileArn.*",
            "InvalidParameterValue",
            "InvalidParameterCombination",
            "InvalidParameter",
        ),
        reaction="stop",
        cause="EC2 does not accept a parameter: {text}",
        hint="check that the instance profile exists (`hetopt doctor`); "
        "`hetopt launch PLAN --on ec2 --dry-run` shows each call",
        source=_EC2 + f"; InvalidIamInstanceProfileArn: {facts.NONE_FOUND}",
    ),
    Meaning(
        codes=(f"{facts.NO_ROLE.value}*",),
        reaction="stop",
        cause="IAM knows no such role or instance profile: {text}",
        hint="an administrator makes it with the commands of `hetopt setup --print-policy`",
        source="IAM API reference, GetRole and GetInstanceProfile",
    ),
    Meaning(
        codes=("Invalid*.NotFound*", "NoSuch*", "InvalidFleetId*"),
        reaction="stop",
        cause="what was asked for is not there: {text}",
        hint="look with `hetopt gc --on ec2`",
        source=_EC2 + "; " + _S3,
    ),
    Meaning(
        codes=("DryRunOperation",),
        reaction="stop",
        cause="the call was only tried, and would have been allowed",
        hint="nothing needs to be done",
        source=_EC2,
    ),
)

_ORGANISATION = (
    "the organisation forbids it, whatever the account allows: ask its administrators, or plan for another region, "
    "`hetopt recommend PROFILE --region REGION`"
)
_DENIERS = {
    facts.ORGANISATION_DENIES.value: _ORGANISATION,
    facts.RESOURCES_ARE_GUARDED.value: _ORGANISATION,
    facts.KEY_DENIES.value: "the bucket's key must be allowed to you and to the machines' role, by who keeps it; or "
    "make a bucket that needs none, `hetopt setup --create-bucket --bucket NAME`, and name that `bucket`",
    facts.BUCKET_DENIES.value: "the bucket's own policy denies it, whatever yours allows: read it with `aws s3api "
    "get-bucket-policy --bucket {bucket}`, or name another `bucket`",
    facts.BOUNDARY_DENIES.value: "the permissions boundary of these credentials denies it: who set it must widen it",
    facts.SESSION_DENIES.value: "the policy that this session was given when it began denies it: begin one without, or "
    "with that of `hetopt setup --print-policy`",
    facts.OWN_POLICY_DENIES.value: "a policy of your own denies it, whatever others allow: an administrator takes that "
    "out",
    facts.ENDPOINT_DENIES.value: "the policy of the network's endpoint denies it: its administrators allow it, or "
    "launch from another network",
}
"""What to do where something else than the caller's own policies denies a call, by what its text names; the first."""

UNKNOWN = Meaning(
    codes=("*",),
    reaction="stop",
    cause="{service} refused {action}: {text} ({code})",
    hint="`hetopt doctor` may know why",
    source="none: what has no row",
)


def meaning_of(code: str) -> Meaning:
    """The row for a code. An exact name wins over a pattern, an earlier row over a later."""
    for row in TABLE:
        if code in row.codes:
            return row
    return next((row for row in TABLE if any(fnmatchcase(code, pattern) for pattern in row.codes)), UNKNOWN)


class ApiRefused(CloudRefused):
    """One call that the cloud refused, in words.

    Attributes:
        code: of the API.
        text: what the API said.
        reaction: whether trying again can help.
        is_known: whether the table has the code.
        may_be_done: whether it, or an attempt before the one that was refused, may have been carried out.
    """

    def __init__(self, request: Request, code: str, text: str, *, endpoint: str = "AWS") -> None:
        row = meaning_of(code)
        words = _words(request, code, text, endpoint)
        hint = next((hint for named, hint in _DENIERS.items() if named in text), row.hint)
        super().__init__(f"{row.cause.format_map(words)}.", hint=hint.format_map(words))
        self.code = code
        self.text = text
        self.request = request
        self.reaction = row.reaction
        self.is_known = row is not UNKNOWN
        self.may_be_done = row.reaction == "again"


def if_there(edge: Edge, request: Request, absent: Collection[str] = facts.NO_OBJECT.value) -> Answer | None:
    """What the cloud answers about a thing; None where it is not there, by these codes.

    Raises:
        CloudRefused: for any other reason.
    """
    try:
        return edge(request)
    except ApiRefused as refused:
        if refused.code in absent:
            return None
        raise


def _words(request: Request, code: str, text: str, endpoint: str) -> dict[str, str]:
    types = instance_types_of(request)
    market = market_of(request)
    quota = quota_of(types[0], market) if types else None
    fleet = request.operation == "create_fleet" and "spot" not in text.lower()
    return {
        "action": request.api_name,
        "service": request.service,
        "code": code,
        # Some refusals begin with what was just said, and end with a page of what only AWS can decode.
        "text": " ".join(text.partition("Encoded authorization failure message")[0].split())
        .removeprefix(facts.DENIED_SENTENCE.value)
        .strip()[:300]
        .rstrip(" .")
        or "no reason was given",
        "endpoint": endpoint,
        "types": ", ".join(types) or "machines",
        "quota": f"{quota.name}, {quota.code}" if quota else code,
        "quota_code": quota.code if quota else "CODE",
        "linked_role": (facts.FLEET_SERVICE if fleet else facts.SPOT_SERVICE).value,
        "linked_name": "fleets" if fleet else "spot machines",
        "bucket": str(request.parameters.get("Bucket", "")),
        "key": str(request.parameters.get("Key", "")),
    }


def instance_types_of(request: Request) -> list[str]:
    """The types that a call asks for."""
    configs = request.parameters.get("LaunchTemplateConfigs", ())
    found = [override["InstanceType"] for config in configs for override in config["Overrides"]]
    return list(dict.fromkeys(found))


def market_of(request: Request) -> Literal["spot", "on-demand"]:
    """The market that a fleet is asked for on."""
    target = request.parameters.get("TargetCapacitySpecification", {})
    return "on-demand" if target.get("DefaultTargetCapacityType") == "on-demand" else "spot"
