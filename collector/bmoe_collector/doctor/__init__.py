"""What a good night needs of this host and of a phone as adb's shell sees it: `bmoe doctor [DEVICE]`.

`check.py` one answer; `machine.py` this host; `asking.py` the questions to a phone's shell; `dumps.py` what the answers say (pure).
"""
