"""Every member of every call that is sent to AWS, read in the API's own documentation (botocore's model).

"Fits the model" is not "is allowed by the model's prose": a member can be typed right and documented as not allowed in
this form of the call. So a member that stands in no list here fails the test that sent it. Read its documentation, then
put it among the `PLAIN` ones if that names no condition, and else under `ON_CONDITION`, with why the condition holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

READ = "2026-11-26, the service models of botocore 1.44.5"
"""When the documentation was last read, of all that follow."""

PAGES = frozenset({"NextToken", "ContinuationToken", "Marker"})
"""What paginators add."""

_TAGS = "TagSpecifications TagSpecifications.ResourceType TagSpecifications.Tags TagSpecifications.Tags.Key " + (
    "TagSpecifications.Tags.Value"
)
_FILTERS = "Filters Filters.Name Filters.Values"
_OBJECT = "Bucket ExpectedBucketOwner Key"

PLAIN: Mapping[str, str] = {
    "ec2:AuthorizeSecurityGroupEgress": "GroupId IpPermissions IpPermissions.UserIdGroupPairs "
    "IpPermissions.UserIdGroupPairs.GroupId IpPermissions.IpRanges",
    "ec2:AuthorizeSecurityGroupIngress": "GroupId IpPermissions IpPermissions.UserIdGroupPairs "
    "IpPermissions.UserIdGroupPairs.GroupId",
    "ec2:CreateFleet": "Type ClientToken LaunchTemplateConfigs LaunchTemplateConfigs.LaunchTemplateSpecification "
    "LaunchTemplateConfigs.Overrides OnDemandOptions OnDemandOptions.AllocationStrategy SpotOptions "
    "SpotOptions.AllocationStrategy TargetCapacitySpecification TargetCapacitySpecification.DefaultTargetCapacityType "
    "TargetCapacitySpecification.TotalTargetCapacity TagSpecifications TagSpecifications.Tags "
    "TagSpecifications.Tags.Key TagSpecifications.Tags.Value",
    "ec2:CreateLaunchTemplate": "ClientToken LaunchTemplateName LaunchTemplateData "
    "LaunchTemplateData.BlockDeviceMappings LaunchTemplateData.BlockDeviceMappings.DeviceName "
    "LaunchTemplateData.BlockDeviceMappings.Ebs LaunchTemplateData.BlockDeviceMappings.Ebs.DeleteOnTermination "
    "LaunchTemplateData.BlockDeviceMappings.Ebs.VolumeType LaunchTemplateData.IamInstanceProfile "
    "LaunchTemplateData.IamInstanceProfile.Name LaunchTemplateData.ImageId LaunchTemplateData.MetadataOptions "
    "LaunchTemplateData.MaintenanceOptions "
    "LaunchTemplateData.MetadataOptions.HttpEndpoint "
    "LaunchTemplateData.MetadataOptions.HttpTokens LaunchTemplateData.MetadataOptions.InstanceMetadataTags "
    "LaunchTemplateData.TagSpecifications LaunchTemplateData.TagSpecifications.Tags "
    "LaunchTemplateData.TagSpecifications.Tags.Key LaunchTemplateData.TagSpecifications.Tags.Value "
    "TagSpecifications TagSpecifications.Tags TagSpecifications.Tags.Key TagSpecifications.Tags.Value",
    "ec2:CreateSecurityGroup": f"Description VpcId DryRun {_TAGS}",
    "ec2:DeleteFleets": "FleetIds",
    "ec2:DeleteSecurityGroup": "GroupId",
    "ec2:DeleteVolume": "VolumeId",
    "ec2:DescribeAvailabilityZones": "",
    "ec2:DescribeImages": f"Owners {_FILTERS}",
    "ec2:DescribeInstanceTypeOfferings": f"{_FILTERS} LocationType MaxResults",
    "ec2:DescribeInstanceTypes": "MaxResults",
    "ec2:DescribeInstances": _FILTERS,
    "ec2:DescribeLaunchTemplates": _FILTERS,
    "ec2:DescribeRegions": "",
    "ec2:DescribeRouteTables": _FILTERS,
    "ec2:DescribeSecurityGroups": f"GroupIds {_FILTERS}",
    "ec2:DescribeSpotPriceHistory": "InstanceTypes ProductDescriptions StartTime EndTime MaxResults",
    "ec2:DescribeSubnets": f"SubnetIds {_FILTERS}",
    "ec2:DescribeTags": _FILTERS,
    "ec2:DescribeVolumes": _FILTERS,
    "ec2:DescribeVpcs": "VpcIds",
    "ec2:GetEbsDefaultKmsKeyId": "",
    "ec2:RevokeSecurityGroupEgress": "GroupId IpPermissions.IpRanges",
    "ec2:RunInstances": "BlockDeviceMappings BlockDeviceMappings.DeviceName BlockDeviceMappings.Ebs "
    "BlockDeviceMappings.Ebs.DeleteOnTermination BlockDeviceMappings.Ebs.VolumeType DryRun IamInstanceProfile "
    "IamInstanceProfile.Name InstanceMarketOptions InstanceMarketOptions.MarketType InstanceMarketOptions.SpotOptions "
    "InstanceType MaintenanceOptions MaintenanceOptions.AutoRecovery MetadataOptions MetadataOptions.HttpTokens "
    "MetadataOptions.HttpEndpoint MetadataOptions.InstanceMetadataTags TagSpecifications TagSpecifications.Tags "
    "TagSpecifications.Tags.Key TagSpecifications.Tags.Value",
    "iam:GetInstanceProfile": "InstanceProfileName",
    "iam:GetRole": "RoleName",
    "iam:SimulatePrincipalPolicy": "ActionNames ContextEntries ContextEntries.ContextKeyName "
    "ContextEntries.ContextKeyType ContextEntries.ContextKeyValues ResourceArns",
    "kms:DescribeKey": "KeyId",
    "kms:ListGrants": "KeyId",
    "s3:AbortMultipartUpload": f"{_OBJECT} UploadId",
    "s3:CompleteMultipartUpload": f"{_OBJECT} UploadId MultipartUpload MultipartUpload.Parts "
    "MultipartUpload.Parts.ETag MultipartUpload.Parts.PartNumber MultipartUpload.Parts.ChecksumCRC32",
    "s3:CreateMultipartUpload": f"{_OBJECT} ChecksumAlgorithm",
    "s3:DeleteObject": _OBJECT,
    "s3:GetBucketLifecycleConfiguration": "Bucket ExpectedBucketOwner",
    "s3:GetBucketPolicy": "Bucket ExpectedBucketOwner",
    "s3:GetBucketVersioning": "Bucket ExpectedBucketOwner",
    "s3:GetObjectLockConfiguration": "Bucket ExpectedBucketOwner",
    "s3:GetObject": f"{_OBJECT} Range",
    "s3:GetPublicAccessBlock": "Bucket",
    "s3:HeadBucket": "Bucket ExpectedBucketOwner",
    "s3:HeadObject": _OBJECT,
    "s3:ListObjectsV2": "Bucket ExpectedBucketOwner",
    "s3:PutBucketEncryption": "Bucket ExpectedBucketOwner ServerSideEncryptionConfiguration "
    "ServerSideEncryptionConfiguration.Rules "
    "ServerSideEncryptionConfiguration.Rules.ApplyServerSideEncryptionByDefault "
    "ServerSideEncryptionConfiguration.Rules.ApplyServerSideEncryptionByDefault.SSEAlgorithm",
    "s3:PutBucketLifecycleConfiguration": "Bucket ExpectedBucketOwner LifecycleConfiguration "
    "LifecycleConfiguration.Rules LifecycleConfiguration.Rules.ID LifecycleConfiguration.Rules.Status "
    "LifecycleConfiguration.Rules.Expiration LifecycleConfiguration.Rules.Expiration.Days "
    "LifecycleConfiguration.Rules.NoncurrentVersionExpiration "
    "LifecycleConfiguration.Rules.NoncurrentVersionExpiration.NoncurrentDays "
    "LifecycleConfiguration.Rules.AbortIncompleteMultipartUpload "
    "LifecycleConfiguration.Rules.AbortIncompleteMultipartUpload.DaysAfterInitiation",
    "s3:PutBucketPolicy": "Bucket ExpectedBucketOwner Policy",
    "s3:PutObject": f"{_OBJECT} Body",
    "s3:PutPublicAccessBlock": "Bucket ExpectedBucketOwner PublicAccessBlockConfiguration "
    "PublicAccessBlockConfiguration.BlockPublicAcls PublicAccessBlockConfiguration.IgnorePublicAcls "
    "PublicAccessBlockConfiguration.BlockPublicPolicy PublicAccessBlockConfiguration.RestrictPublicBuckets",
    "s3:UploadPart": f"{_OBJECT} UploadId Body",
    "scheduler:CreateScheduleGroup": "Name Tags Tags.Key Tags.Value",
    "scheduler:DeleteScheduleGroup": "Name ClientToken",
    "scheduler:ListScheduleGroups": "NamePrefix",
    "scheduler:ListTagsForResource": "ResourceArn",
    "service-quotas:GetAWSDefaultServiceQuota": "ServiceCode QuotaCode",
    "service-quotas:GetServiceQuota": "ServiceCode QuotaCode",
    "ssm:GetParameter": "Name",
    "sts:GetCallerIdentity": "",
}
"""Members whose documentation names no condition that could fail in the form that is sent."""

_INSTANT = "'Supported only for fleets of type instant': ours are"
_EITHER = "'Either the id or the name': the id alone is sent"

ON_CONDITION: Mapping[tuple[str, str], str] = {
    ("ec2:AuthorizeSecurityGroupEgress", "IpPermissions.IpProtocol"): "'For tcp you must specify a port range': it is",
    ("ec2:AuthorizeSecurityGroupEgress", "IpPermissions.FromPort"): "of tcp: the beginning of the range",
    ("ec2:AuthorizeSecurityGroupEgress", "IpPermissions.ToPort"): "of tcp: the end of the range",
    ("ec2:AuthorizeSecurityGroupEgress", "IpPermissions.IpRanges.CidrIp"): "'A range or a group, not both': each has "
    "a permission of its own",
    ("ec2:AuthorizeSecurityGroupIngress", "IpPermissions.IpProtocol"): "-1 is all, whatever the ports: none are sent",
    ("ec2:CreateFleet", "DryRun"): "tried by the doctor",
    ("ec2:CreateFleet", "LaunchTemplateConfigs.LaunchTemplateSpecification.LaunchTemplateId"): _EITHER,
    ("ec2:CreateFleet", "LaunchTemplateConfigs.LaunchTemplateSpecification.Version"): "'You must specify a value'",
    ("ec2:CreateFleet", "LaunchTemplateConfigs.Overrides.InstanceType"): "'Not with InstanceRequirements': none sent",
    ("ec2:CreateFleet", "LaunchTemplateConfigs.Overrides.SubnetId"): "'A request of type instant can have only one'",
    ("ec2:CreateFleet", "OnDemandOptions.MinTargetCapacity"): "'At least one of SingleAvailabilityZone or "
    "SingleInstanceType': the first; at most 1000. " + _INSTANT,
    ("ec2:CreateFleet", "OnDemandOptions.SingleAvailabilityZone"): _INSTANT,
    ("ec2:CreateFleet", "SpotOptions.MinTargetCapacity"): "as on demand",
    ("ec2:CreateFleet", "SpotOptions.SingleAvailabilityZone"): _INSTANT,
    ("ec2:CreateFleet", "TagSpecifications.ResourceType"): "'If the fleet type is instant: fleet, instance, volume, "
    "network-interface'",
    ("ec2:CreateLaunchTemplate", "DryRun"): "tried by the doctor",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted"): "'If you are creating a "
    "volume from a snapshot, you can't': no snapshot is named; Karpenter's templates send the same for root disks",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.BlockDeviceMappings.Ebs.VolumeSize"): "'A snapshot or a size': a "
    "size, which is at least the image's (`account.boot_image`)",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.InstanceInitiatedShutdownBehavior"): "the default is to stop",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.MaintenanceOptions.AutoRecovery"): "'Disables the automatic "
    "recovery': a machine that boots again has nothing to do",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.MetadataOptions.HttpPutResponseHopLimit"): "1 to 64",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.SecurityGroupIds"): "'Not beside a network interface': none sent",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.NetworkInterfaces"): "'Not beside security groups': then none are "
    "sent; Karpenter's templates hold one interface beside fleets whose overrides name the subnet",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.NetworkInterfaces.AssociatePublicIpAddress"): "'eth0 and a new "
    "interface only': it is one",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.NetworkInterfaces.DeleteOnTermination"): "goes with its machine",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.NetworkInterfaces.DeviceIndex"): "'The primary one is 0'",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.NetworkInterfaces.Groups"): "'ids of the groups': one",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.TagSpecifications.ResourceType"): "'instance, volume, "
    "network-interface or spot-instances-request, which the instance must have': all have a disk and an interface",
    ("ec2:CreateLaunchTemplate", "LaunchTemplateData.UserData"): "'base64, at most 16 KB': see `bootstrap.user_data`",
    ("ec2:CreateLaunchTemplate", "TagSpecifications.ResourceType"): "'must be launch-template'",
    ("ec2:CreateSecurityGroup", "GroupName"): "'Up to 255 characters, not beginning with sg-': hetopt-RUN",
    ("ec2:DeleteFleets", "TerminateInstances"): "'For instant fleets, you cannot specify NoTerminateInstances': True",
    ("ec2:DeleteLaunchTemplate", "LaunchTemplateId"): _EITHER,
    ("ec2:DescribeFleets", "FleetIds"): "'If a fleet is of type instant, you must specify the fleet ID'; one that is "
    "forgotten is an error, see `Remover`",
    ("ec2:DescribeImages", "ImageIds"): "one that is not there is an error, which is told",
    ("ec2:RevokeSecurityGroupEgress", "IpPermissions"): "'No group beside a range in one set': a range alone",
    ("ec2:RevokeSecurityGroupEgress", "IpPermissions.IpProtocol"): "-1 is all, whatever the ports: none are sent",
    ("ec2:RevokeSecurityGroupEgress", "IpPermissions.IpRanges.CidrIp"): "'A range or a group, not both': a range",
    ("ec2:RunInstances", "BlockDeviceMappings.Ebs.Encrypted"): "'In no case can you remove encryption': it is set",
    ("ec2:RunInstances", "BlockDeviceMappings.Ebs.VolumeSize"): "'A snapshot or a size': a size, at least the image's",
    ("ec2:RunInstances", "ImageId"): "'Must be specified here or in a launch template': here",
    ("ec2:RunInstances", "InstanceInitiatedShutdownBehavior"): "the default is to stop",
    ("ec2:RunInstances", "InstanceMarketOptions.SpotOptions.SpotInstanceType"): "'persistent only with hibernate or "
    "stop': one-time",
    ("ec2:RunInstances", "MaxCount"): "'Between 1 and the quota': as many as are wanted, only tried",
    ("ec2:RunInstances", "MetadataOptions.HttpPutResponseHopLimit"): "1 to 64",
    ("ec2:RunInstances", "MinCount"): "'Between 1 and the quota': as many as are wanted, only tried",
    ("ec2:RunInstances", "SubnetId"): "'Not beside a network interface': none sent",
    ("ec2:RunInstances", "TagSpecifications.ResourceType"): "'instances, volumes, spot requests, network interfaces'",
    ("ec2:TerminateInstances", "InstanceIds"): "one that is not there spares all, see `Remover`; 1000 at most",
    ("scheduler:CreateSchedule", "ActionAfterCompletion"): "DELETE: 'after the schedule completes invoking the target'",
    ("scheduler:CreateSchedule", "FlexibleTimeWindow"): "'Mode is required': OFF, so that no window is named",
    ("scheduler:CreateSchedule", "FlexibleTimeWindow.Mode"): "OFF or FLEXIBLE",
    ("scheduler:CreateSchedule", "GroupName"): "'If you omit this, the default group': one that was just made",
    ("scheduler:CreateSchedule", "Name"): "at most 64 characters of letters, digits, - _ .: an instance's id",
    ("scheduler:CreateSchedule", "ScheduleExpression"): "at(yyyy-mm-ddThh:mm:ss), in UTC where no time zone is named",
    ("scheduler:CreateSchedule", "Target"): "'Arn and RoleArn are required': both are sent",
    ("scheduler:CreateSchedule", "Target.Arn"): "a universal target: service and operation in the SDK's spelling",
    ("scheduler:CreateSchedule", "Target.Input"): "the operation's parameters, as JSON",
    ("scheduler:CreateSchedule", "Target.RoleArn"): "one that trusts the scheduler: see `permissions.end_trust`",
    ("scheduler:UpdateSchedule", "ActionAfterCompletion"): "DELETE: 'after the schedule completes invoking the target'",
    ("scheduler:UpdateSchedule", "FlexibleTimeWindow"): "'Mode is required': OFF, so that no window is named",
    ("scheduler:UpdateSchedule", "FlexibleTimeWindow.Mode"): "OFF or FLEXIBLE",
    ("scheduler:UpdateSchedule", "GroupName"): "'If you omit this, the default group': the one that it is in",
    ("scheduler:UpdateSchedule", "Name"): "at most 64 characters of letters, digits, - _ .: an instance's id",
    ("scheduler:UpdateSchedule", "ScheduleExpression"): "at(yyyy-mm-ddThh:mm:ss), in UTC where no time zone is named",
    ("scheduler:UpdateSchedule", "Target"): "'Arn and RoleArn are required': both are sent",
    ("scheduler:UpdateSchedule", "Target.Arn"): "a universal target: service and operation in the SDK's spelling",
    ("scheduler:UpdateSchedule", "Target.Input"): "the operation's parameters, as JSON",
    ("scheduler:UpdateSchedule", "Target.RoleArn"): "one that trusts the scheduler: see `permissions.end_trust`",
    ("iam:SimulatePrincipalPolicy", "PolicySourceArn"): "'a user, group or role', no session: see `_policies_of`",
    ("s3:CreateBucket", "Bucket"): "lower case, 3 to 63 characters: checked by the order",
    ("s3:CreateBucket", "CreateBucketConfiguration"): "not in us-east-1, where none is sent",
    ("s3:CreateBucket", "CreateBucketConfiguration.LocationConstraint"): "not in us-east-1, where none is sent",
    ("s3:GetObject", "IfMatch"): "'412 if another was written meanwhile': boto3's download tries again",
    ("s3:ListObjectsV2", "Prefix"): "'Directory buckets: must end in a delimiter': ours are general purpose buckets",
    ("s3:ListObjectsV2", "StartAfter"): "'Not for directory buckets': ours are none",
    ("s3:PutBucketLifecycleConfiguration", "LifecycleConfiguration.Rules.Filter"): "'exactly one of its members'",
    ("s3:PutBucketLifecycleConfiguration", "LifecycleConfiguration.Rules.Filter.Prefix"): "the one member",
    ("s3:PutObject", "ChecksumAlgorithm"): "'There must be a corresponding header': boto3's upload sends both",
    ("s3:PutObject", "IfMatch"): "'412 if another was written, 409 in a race': both are expected",
    ("s3:PutObject", "IfNoneMatch"): "'Expects *': that is sent",
    ("s3:UploadPart", "ChecksumAlgorithm"): "'There must be a corresponding header': boto3's upload sends both",
    ("s3:UploadPart", "PartNumber"): "1 to 10,000: parts of 16 MB or more make that 160 GB",
}
"""Members whose documentation names a condition, and why it holds."""


def members(parameters: Any, at: str = "") -> Iterator[str]:
    """The members of a call's parameters, as 'Overrides.InstanceType'."""
    if isinstance(parameters, Mapping):
        for name, value in parameters.items():
            yield f"{at}{name}"
            yield from members(value, f"{at}{name}.")
    elif isinstance(parameters, list | tuple):
        for value in parameters:
            yield from members(value, at)


def unread(call: str, parameters: Mapping[str, Any]) -> list[str]:
    """The members of a call whose documentation nobody has read."""
    if call not in PLAIN and not any(call == named for named, _ in ON_CONDITION):
        return [f"{call} as a whole"]
    read = {*PLAIN.get(call, "").split(), *(member for named, member in ON_CONDITION if named == call), *PAGES}
    return sorted({f"{call} {member}" for member in members(parameters)} - {f"{call} {member}" for member in read})
