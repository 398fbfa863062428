"""`papaya load`: its task goes to its own devices only."""

from __future__ import annotations

from papaya.cli.load import LoadOptions, _config, _plan
from papaya.config import TaskConfig
from papaya.messages.control import Advertised
from papaya.messages.selection import Capabilities, DeviceClass, Rejected
from tests.unit.selector.builders import BOOT, an_open_selector, answers, check_in, orders


def test_the_task_of_a_load_goes_to_its_own_devices_only() -> None:
    options = LoadOptions()
    own, another = _config(options, "load-1"), _config(options, "load-2")
    selector = an_open_selector()
    offer = Advertised(own.task, own.requirements)
    selector.receive(BOOT, orders(1, advertised=(offer,), wanting=(own.task,)))

    def is_refused(capabilities: Capabilities) -> bool:
        arrived = check_in(DeviceClass(capabilities))
        answer = answers(selector.receive(BOOT + 1, arrived, capabilities)).get(capabilities)
        assert answer is None or isinstance(answer, Rejected)
        return answer is not None

    def declared(*configs: TaskConfig) -> Capabilities:
        return Capabilities(labels=_plan(options, "token", configs).labels)

    assert is_refused(Capabilities(labels=("eu",)))
    assert is_refused(declared(another))
    assert not is_refused(declared(own)), "it is held for an assignment"
