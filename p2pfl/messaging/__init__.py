"""What peers send each other.

    algorithm ── Net ── Endpoint ── Link ── … ── Link ── Endpoint ── Net ── algorithm
             (one round)   ├─ Journal    what this peer has sent, each entry once for all its readers
                           ├─ Mailbox    messages that have arrived, and waits
                           ├─ Pipeline   changes what leaves and arrives, for codecs and adversaries
                           └─ Directions  which neighbors send and receive

``wire`` turns a body (``schema``) into an entry of the journal and back. A Link delivers entries: LocalLink within
one process, ZmqLink over sockets, as the two ends of ``edge`` decide. The Endpoint is the same for both, and so are
the bytes that it counts.

Invariants:

1. ``gather`` returns ascending peer ids, regardless of the order of arrival: floating-point sums never depend on it.
2. The mailbox is a FIFO per (round, kind, sender): a message for a later round waits until that round, and one for an
   earlier round is discarded. So a message is used in the round that it was sent in, or never.
3. Every wait ends (``WaitPolicy``): with the message, at the deadline, when the neighbor has finished or is declared
   dead, or when it is in a later round, which Begin or any other entry of that round shows. The round continues
   without the missing peers, listed in ``missing``. A body with NaN, infinity or diverged values
   counts as missing too (``nonfinite``): a peer whose training diverges does not affect its neighbors.
4. An entry's id is (round, number in the round), and ascends in a journal. A peer that crashed repeats the rounds
   since its checkpoint and writes the same entries with the same ids, because its random streams are restored and its
   neighbors replay what it had received. Readers ignore entries that they have. Skipped rounds have no entries.
5. An entry is kept until it is in its readers' checkpoints before the last one, or they were declared dead or have
   finished. A peer that resumes, even from that checkpoint, therefore finds all entries since; by invariant 2 it
   wants them from the beginning of its round, and no cursor is part of a checkpoint.
6. On an edge, entries arrive in order and each once: an entry names its predecessor, so a gap is noticed, and an
   epoch tells what is sent now from what an earlier process or a lost connection left behind (``edge``).
7. After a peer was declared dead, its neighbors keep only the last two rounds for it. If it returns, Start says which
   rounds are lost, and it skips them (``next_round``).
8. Sources and receivers change between rounds only. A method that prunes states its sources in Begin, and its
   neighbors wait for that before they send, so that equal runs send equal messages. If Begin is late, the last
   statement stands, and Nothing ends the wait of a neighbor to which no message comes. They decide to whom a
   method addresses entries, not what a link delivers: allreduce sends along a tree, to receivers or not.
"""
