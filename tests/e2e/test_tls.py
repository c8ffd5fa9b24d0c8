"""A whole run under mutual TLS, whose certificates and authority are replaced while it is running."""

from pathlib import Path

import grpc
import pytest

from nexrl.local.launcher import controller_address
from nexrl.rpc.client import connect
from nexrl.tls import Tls
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl_operator.authority import Issued, issue
from tests.support.certificates import OTHERS, OURS, Authority, environment, write
from tests.support.runs import Run, nexrl, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS = 20


async def test_a_run_goes_on_while_its_certificates_and_its_authority_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Authority(), Authority()
    for name, value in environment(first.write(tmp_path / "tls")).items():
        monkeypatch.setenv(name, value)
    small = (f"trainer.steps={STEPS}", "trajectoryPool.batchSize=32", "rollout.workers=64")
    async with running(tmp_path, *small) as run:
        step = await run.until_step(1)
        await _refuses_strangers(run, first)
        # The way to replace an authority: all trust both, all show the new one's, nobody trusts the old one.
        both = first.ca.certificate + second.ca.certificate
        for trusted, issuer in ((both, first), (both, second), (second.ca.certificate, second)):
            write(tmp_path / "tls", Issued(trusted, b""), issue(issuer.ca, [], OURS))
            step = await run.until_step(step + 2)
        await run.ends()
    logs = {log.stem: log.read_text() for log in run.folder.glob("logs/*.log")}
    assert not [name for name, log in logs.items() if "Traceback" in log]
    assert [name for name, log in logs.items() if "SSL" in log] == ["controller"]  # by whom strangers were refused
    assert {name for name, log in logs.items() if "reloaded the certificate" in log} >= {"trainer", "rollout-0"}
    audited = nexrl(tmp_path, "audit", str(run.folder))
    assert audited.returncode == 0, audited.stdout + audited.stderr


async def _refuses_strangers(run: Run, authority: Authority) -> None:
    address = controller_address(run.folder)
    others = authority.write(run.root / "others", OTHERS)
    expected = {
        connect(address, Tls(others.ca, OURS, others.certificate, others.key)): grpc.StatusCode.PERMISSION_DENIED,
        grpc.aio.insecure_channel(address): grpc.StatusCode.UNAVAILABLE,
    }
    for channel, code in expected.items():
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await ControllerServiceStub(channel).GetExperiment(pb.GetExperimentRequest(), timeout=20)
        assert refusal.value.code() == code
