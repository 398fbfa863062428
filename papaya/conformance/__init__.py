"""The conformance kit (`papaya conformance`): does a client keep the rules of the protocol's page?

    client under test ──▶ gateway ──▶ a real server on loopback, with a real software TSA
                            │
                            ├─ scenario   perturbs requests and answers
                            └─ transcript what was asked, answered and lost ──▶ judge ──▶ report

    rules        the rules, each with its heading on docs/spec/protocol.md
    gateway      passes requests to the server and records them
    scenarios    one path or fault each
    judge        reads a transcript and says which rules were kept, broken or not exercised
    kit          the server, its tasks, and one run of all scenarios
    vectors      test vectors of every format, most of them invalid

There is no second server here: every answer comes from the real one, unless a scenario replaces it.
"""
