# SPDX-License-Identifier: Apache-2.0
"""Receives one weight update on a ZMQ handle and prints what happened as one line of JSON.

Arguments: handle, behaviour (load | raise | die), time-out in seconds.
"""

import json
import os
import sys

os.environ["VERL_PLATFORM"] = "cpu"

import torch  # noqa: E402 - the platform must be chosen before verl is imported

from flashrl_verl.refit.transfer import DrainingReceiver  # noqa: E402


def main(handle: str, behaviour: str, timeout_s: str) -> None:
    got: dict[str, float] = {}

    def load(weights):
        if behaviour == "raise" and got:
            raise ValueError("the second bucket does not load")
        if behaviour == "die" and got:
            os._exit(9)
        got.update({name: float(t.double().sum()) for name, t in weights})

    receiver = DrainingReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True, timeout_s=float(timeout_s))
    try:
        receiver.drain(load)
        result = ["ok", got]
    except Exception as error:  # noqa: BLE001 - the test looks at it
        result = [type(error).__name__, str(error)]
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
