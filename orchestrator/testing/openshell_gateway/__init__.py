"""A simulated OpenShell gateway: real gRPC, real processes, and everything that may go wrong.

```python
with OpenShellGateway() as gateway:
    client = openshell.SandboxClient(gateway.endpoint)
```

or `python -m orchestrator.testing.openshell_gateway --port 0 --root DIR`, which prints the endpoint
and serves until it is interrupted. It speaks version 0.1.x over the stubs of the SDK (`openshell`,
0.1.5 or newer below 0.2), listens on the loopback interface alone, and authenticates nobody.

It is for tests of a client, and is as unpleasant as the real one: a command is a process of its own
that runs on after the client's deadline, cancel or death, and after the gateway's exit event 124;
deletion is accepted first and happens later; a request above 1 MiB is not decoded; nothing lists or
kills what was executed; a stream may end without an exit event. `Fault` says what more may go
wrong, for a sandbox by its label `FAULT_LABEL`, or at any exec by `OpenShellGateway.inject`.

A sandbox is a directory and a supervisor, the parent and subreaper of all that is executed there:
when a sandbox is deleted nothing of it runs, whatever it did to its session or group.

Not simulated, so no test here says anything about it:

* isolation of any kind: Landlock, users, network policy, mounts, process namespaces. A command sees
  this machine, as this user. Its HOME and first directory is the sandbox's own and is deleted with
  it; `/tmp` is everybody's, and what is written there stays. A policy is reported, not enforced;
* seccomp, but for `kill` of pid <= 0, which fails with EPERM on Linux on x86_64 and aarch64, as
  does `kill` of the supervisor;
* images, providers, templates, services, SSH and TCP forwarding, interactive exec, terminals,
  restart policies, more than one workspace, and authentication: UNIMPLEMENTED, ignored or refused;
* limits on relays, connections and time (except by a fault), that admitted requests are forgotten
  after a day (`REQUEST_REPLAY_UNAVAILABLE`), who asked for them, and gateways 0.0.x;
* what no source tells: that `workspace_scope` is required, the words of some refusals.
"""

from .faults import FAULT_LABEL, Fault
from .handle import Executed, OpenShellGateway
from .options import Options

__all__ = ["FAULT_LABEL", "Executed", "Fault", "OpenShellGateway", "Options"]
