"""What a mode promises, looked at by playing it: `polytempo modes check`, the first look before a job, and tests.

    driver, orders, small_job, states
                                  machines and policies in a job of messages, one move at a time
    walk                          every order in which a small job can go, the shortest first
    judge, games                  random jobs of more workers, whose decisions are held to what the mode promises
    alone                         one worker trains as the script would
    check                         all of it within some seconds; a first look, a part of it, within a moment

It is the second opinion on a mode: nothing here is the simulator's or the live job's. What is broken is a `Broken`.
"""
