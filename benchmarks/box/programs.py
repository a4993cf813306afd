"""The programs that a whole machine has and a network namespace has not, each small and real.

``shutdown`` ends the instance, timers of ``systemctl`` are processes that sleep, ``aws`` speaks to S3 as the command
line of AWS does, and ``python3.12 -m venv`` makes a real environment that finds the packages which are installed here,
so that ``pip install`` checks every requirement and needs no network, nor anything to be downloaded.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

_SHUTDOWN = """#!{python} -IS
import json, os, sys, time, urllib.request
when = sys.argv[-1]
if when.startswith("+"):
    time.sleep(60 * int(when))
body = {{"id": os.environ["BOX_INSTANCE"], "code": "Client.InstanceInitiatedShutdown", "message": "Instance initiated"}}
request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + "/box/end", json.dumps(body).encode())
urllib.request.urlopen(request, timeout=30).read()
time.sleep(60)  # until the machine is gone
"""

_SYSTEMCTL = """#!/bin/sh
# systemctl restart NAME.timer; daemon-reload and enable have nothing to do where nothing boots again.
[ "$1" = restart ] || exit 0
name="${2%.timer}"; mkdir -p "$BOX_FOLDER/timers"; timer="$BOX_FOLDER/timers/$name"
[ -f "$timer" ] && kill -- "-$(cat "$timer")" && rm "$timer"
end="$(sed -n 's/^OnCalendar=@//p' "$HETOPT_UNITS/$2")"
command="$(sed -n 's/^ExecStart=//p' "$HETOPT_UNITS/$name.service")"
left=$((end - $(date +%s))); [ "$left" -gt 0 ] || left=0
setsid sh -c 'echo $$ >"$0"; sleep "$1"; eval "$2"' "$timer" "$left" "$command" </dev/null >/dev/null 2>&1 &
"""

_AWS = """#!{python}
import sys
import boto3
service, operation, *rest = sys.argv[1:]
given = dict(zip(rest[::2], rest[1::2])) if operation == "put-object" else dict(zip(rest[:-1:2], rest[1:-1:2]))
names = {{"--bucket": "Bucket", "--key": "Key", "--expected-bucket-owner": "ExpectedBucketOwner"}}
parameters = {{names[key]: value for key, value in given.items() if key in names}}
s3 = boto3.client("s3")
if (service, operation) == ("s3api", "get-object"):
    body = s3.get_object(**parameters)["Body"]
    with open(rest[-1], "wb") as stream:
        for chunk in body.iter_chunks(1 << 20):
            stream.write(chunk)
elif (service, operation) == ("s3api", "put-object"):
    with open(given["--body"], "rb") as stream:
        s3.put_object(**parameters, Body=stream)
elif (service, operation) == ("s3", "cp"):
    bucket, _, key = rest[-2].removeprefix("s3://").partition("/")
    s3.download_file(bucket, key, rest[-1])
else:
    sys.exit(f"aws: {{service}} {{operation}} is not known here")
"""

_PYTHON = """#!/bin/sh
# python3.12 -m venv --without-pip FOLDER
[ "$1 $2 $3" = "-m venv --without-pip" ] || exec "{python}" "$@"
"{python}" -m venv --without-pip "$4" && echo "{packages}" >"$(echo "$4"/lib/python*/site-packages)/here.pth" || exit
mv "$4/bin/python" "$4/bin/plain"
cat >"$4/bin/python" <<'END' && chmod +x "$4/bin/python"
#!/bin/sh
here="$(dirname "$0")"
[ "$2" != ensurepip ] || exit 0
[ "$2 $3" != "pip download" ] || exec mkdir -p "$here/../../wheels"
exec "$here/plain" "$@"
END
"""


def install(folder: Path) -> None:
    """Write the programs into a folder that goes first on a machine's PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "shutdown": _SHUTDOWN.format(python=sys.executable),
        "systemctl": _SYSTEMCTL,
        "aws": _AWS.format(python=sys.executable),
        "python3.12": _PYTHON.format(python=sys.executable, packages=sysconfig.get_path("purelib")),
        "dnf": "#!/bin/sh\necho 'nothing can be installed in the box' >&2; exit 1\n",
    }
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
