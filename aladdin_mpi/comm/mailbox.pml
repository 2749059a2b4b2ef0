/*
 * The mailbox protocol towards a server, for the model checker spin.
 *
 * What is modelled
 *   Server     polls one aligned sequence word per slot, reads the slot's payload word by word, merges
 *              it, acknowledges. Whatever it sends to a worker goes through a box: one buffer and at
 *              most one unfinished Isend per worker and kind (acknowledgement, reply). While the box is
 *              full the server only remembers that it owes something, and polls on; later the newest
 *              is sent. So there can be fewer acknowledgements than messages and fewer replies than
 *              were asked for: each says up to which message it speaks, and nobody may count them.
 *   Origin     the communication thread of a worker. Messages are numbered from 1; message n goes into
 *              slot n % SLOTS. While the message before it in that slot is not acknowledged, send() is
 *              False at once, and what training does meanwhile is carried by a later message. Else: Rput
 *              of the payload, local completion, Flush, Put of the sequence word, which lands when it
 *              lands: nobody waits for it.
 *   Link       lands the words of an origin's Puts: in any order, each at any later time. A word is
 *              taken from the staging buffer when it lands. This is stricter than MPI, where the buffer
 *              is free after local completion; it is the mailbox's own rule (free after the Flush).
 *   Trouble    at any moment, even after the end, origin 1 and its link stop for ever: payloads stay
 *              half landed, a Flush under way never returns, boxes stay full. Both origins run the
 *              same code: what holds for 0 beside a broken 1 holds for 1 beside a broken 0.
 *
 * What is not, and why nothing is lost by it
 *   - Training: only how many iterations a message carries matters, and it is chosen when the message
 *     is made: one, or two where a send() that was False made it coalesce.
 *   - Local completion: it comes at any moment and says nothing about the target, so it is no statement
 *     here. To trust it is FAULT_NO_FLUSH.
 *   - Polls that find nothing, and a send() that is False: they change nothing, so they are no steps,
 *     and spin sees who is left waiting for something that never comes. Workers are visited in any order.
 *   - An Isend that is complete before it is received, or whose completion the server sees late: to both
 *     sides it looks like a slower message.
 *   Start (the windows are zero before the first Put), end (BYE, barrier) and several servers per origin
 *   are outside this model.
 *
 * Properties
 *   torn       every payload word read is that of the expected message           assert in read()
 *   sequence   the server takes 1, 2, 3, ... of each origin: none lost, repeated
 *              or out of order; a sequence word is the old one or the next one   assert in poll()
 *   sums       an origin whose messages are all acknowledged finds all its
 *              iterations merged, each once                                      assert in Origin
 *   boxes      a box is written only when its last Isend is complete; numbers
 *              in acknowledgements and replies only grow                         asserts in post(), Origin
 *   no wait    the server waits for nobody, and a healthy origin comes to its
 *              end whatever becomes of the other one. Origin 1 may stop at any
 *              moment, so a server that waits for it is, in some run, away from
 *              end_poll for ever                                                 invalid end states
 *   no wait,   away from end_poll the server can always make its next step
 *   directly   by itself                                                         -DNO_WAIT_CLAIM
 *   ends       no run goes round in circles                                      non-progress cycles
 *
 * How to run it (tests/unit/test_protocol_model.py does)
 *   spin -a mailbox.pml && gcc -O2 -w -DSAFETY -o pan pan.c && ./pan -m10000
 *       torn, sequence, sums, boxes, no wait: 10 million states, about 10 s and 1.2 GB (with -DCOLLAPSE
 *       0.6 GB and 25 s). All holds when it says "errors: 0" and gives no warning about the search.
 *   spin -a -DNO_WAIT_CLAIM -DITERATIONS=3 mailbox.pml && gcc ... -DSAFETY -DNOREDUCE ...
 *   spin -a -DITERATIONS=2 mailbox.pml && gcc ... -DNP -DNOREDUCE ... && ./pan -m10000 -l
 *   After an error, spin -t -p mailbox.pml (with the same -D) prints the steps that led to it.
 *
 * Seeded faults, each of which must be found: spin -a -DFAULT_... mailbox.pml
 *   FAULT_NO_FLUSH          the sequence word is put when the payload is only locally complete
 *   FAULT_REUSE_BEFORE_ACK  a slot is used again without its acknowledgement
 *   FAULT_STAGING_REUSED    the staging buffer is written again before the Flush returned
 *   FAULT_WIDE_RECORD       the sequence word is a record of two words (number, iterations carried)
 *   FAULT_NO_SYNC           the server reads payload earlier than the sequence word (no Win.Sync between)
 *   FAULT_ACK_BEFORE_MERGE  the server acknowledges before it has read the payload
 *   FAULT_BOX_OVERWRITTEN   the server writes a reply over one whose Isend is not complete
 *   FAULT_SERVER_FLUSH      the server waits until its reply has arrived
 */

#define ORIGINS 2
#ifndef SLOTS
#define SLOTS 2                 /* of each origin; 1 is checked too */
#endif
#ifndef ITERATIONS
#define ITERATIONS 4            /* of each origin: up to 4 messages, so each slot is used again */
#endif
#define REPLY_PERIOD 2          /* every second message asks for a reply */

#define WORDS 3                 /* of a payload */
#define HEADER 0                /* the sequence number */
#define DATA 1                  /* iterations carried; marked with the number, so that a tear shows */
#define TRAILER 2               /* the canary: the sequence number again */
#define content(number, iterations) ((number) * 8 + (iterations))

typedef Window {                /* what the server keeps for one origin */
    byte payload[SLOTS * WORDS];
    byte sequence[SLOTS]
#ifdef FAULT_WIDE_RECORD
    ; byte record[SLOTS]
#endif
};

typedef Put {                   /* what one origin has on its way: one payload, a word per slot */
    byte staging[WORDS];
    bool flying[WORDS];
    byte number;                /* of the message */
    byte sequence[SLOTS]        /* that flies to this slot; 0: none */
#ifdef FAULT_WIDE_RECORD
    ; byte record[SLOTS]
#endif
};

Window window[ORIGINS];
Put put[ORIGINS];
byte ack[ORIGINS];              /* boxes, 0 when free: all messages up to this number are merged */
byte reply[ORIGINS];            /*                     the messages up to this number are answered */

byte taken[ORIGINS];            /* by the server: number of the last message */
byte merged[ORIGINS];           /*                iterations */
bool broken;                    /* origin 1 and its link */

#define works(o) (!(broken && (o) == 1))
#define slot(number) ((number) % SLOTS)
#define word(o, number, w) window[o].payload[slot(number) * WORDS + w]

/* ---------------------------------------------------------------------------------- origin */

#define payload_landed(o) (!put[o].flying[HEADER] && !put[o].flying[DATA] && !put[o].flying[TRAILER])
#ifdef FAULT_REUSE_BEFORE_ACK
#define slot_is_free true
#else
#define slot_is_free (sent < acked + SLOTS)
#endif

inline rput_payload(o)
{
    put[o].number = sent;
    put[o].staging[HEADER] = sent;
    put[o].staging[DATA] = content(sent, iterations);
    put[o].staging[TRAILER] = sent;
    put[o].flying[HEADER] = true;
    put[o].flying[DATA] = true;
    put[o].flying[TRAILER] = true
}

inline put_sequence(o)
{
#ifdef FAULT_WIDE_RECORD
    put[o].record[slot(put[o].number)] = put[o].staging[DATA];
#endif
    put[o].sequence[slot(put[o].number)] = put[o].number
}

inline clear_staging(o)         /* nobody looks at it any more: fewer states */
{
    put[o].staging[HEADER] = 0;
    put[o].staging[DATA] = 0;
    put[o].staging[TRAILER] = 0
}

inline receive_reply(o)
{
    assert(reply[o] > replied);
    replied = reply[o];
    reply[o] = 0
}

proctype Origin(byte o)
{
    byte sent = 0;              /* messages */
    byte carried = 0;           /* iterations in them */
    byte acked = 0;             /* messages, as far as known here */
    byte replied = 0;           /* messages answered, as far as known here */
    byte iterations = 0;        /* in the message being made */
    {
        do
        :: d_step { ack[o] != 0 -> assert(ack[o] > acked && ack[o] <= sent); acked = ack[o]; ack[o] = 0 }
        :: d_step { reply[o] != 0 -> receive_reply(o) }

        :: atomic {             /* send() is True */
               carried < ITERATIONS && slot_is_free ->
               if
               :: iterations = 1
               :: carried + 2 <= ITERATIONS -> iterations = 2
               fi;
               d_step { sent++; carried = carried + iterations; rput_payload(o); iterations = 0 }
           }
           /* Test says "locally complete" somewhere here: no condition on what has landed */
#ifdef FAULT_STAGING_REUSED
           put[o].staging[DATA] = content(sent + 1, 1);
#endif
#ifdef FAULT_NO_FLUSH
           d_step { put_sequence(o) }
           d_step { payload_landed(o) -> clear_staging(o) }
#else
           d_step { payload_landed(o) -> put_sequence(o); clear_staging(o) }      /* after Flush */
#endif

        :: carried == ITERATIONS && acked == sent -> break
        od;
        assert(taken[o] == sent && merged[o] == ITERATIONS);
end_done:                       /* until the server's last message */
        do
        :: d_step { reply[o] != 0 -> receive_reply(o) }
        od
    } unless { !works(o) }
}

/* ------------------------------------------------------------------------------------ link */

inline land(o, w)
{
    word(o, put[o].number, w) = put[o].staging[w];
    put[o].flying[w] = false
}

inline land_sequence(o, s)
{
    window[o].sequence[s] = put[o].sequence[s];
    put[o].sequence[s] = 0
}

#ifdef FAULT_WIDE_RECORD
inline land_record(o, s)
{
    window[o].record[s] = put[o].record[s];
    put[o].record[s] = 0
}
#endif

proctype Link(byte o)
{
end_idle:
    do
    :: d_step { works(o) && put[o].flying[HEADER] -> land(o, HEADER) }
    :: d_step { works(o) && put[o].flying[DATA] -> land(o, DATA) }
    :: d_step { works(o) && put[o].flying[TRAILER] -> land(o, TRAILER) }
    :: d_step { works(o) && put[o].sequence[0] -> land_sequence(o, 0) }
#if SLOTS > 1
    :: d_step { works(o) && put[o].sequence[1] -> land_sequence(o, 1) }
#endif
#ifdef FAULT_WIDE_RECORD
    :: d_step { works(o) && put[o].record[0] -> land_record(o, 0) }
    :: d_step { works(o) && put[o].record[1] -> land_record(o, 1) }
#endif
    od
}

proctype Trouble()
{
    broken = true
}

/* ---------------------------------------------------------------------------------- server */

#define expected(o) (taken[o] + 1)
#define previous(o) (expected(o) > SLOTS -> expected(o) - SLOTS : 0)     /* in the same slot */
#define arrived(o) (window[o].sequence[slot(expected(o))] != previous(o))

inline poll(worker)
{
    o = worker;
    assert(window[o].sequence[slot(expected(o))] == expected(o))
}

inline read(w, value)           /* one word of the payload; the model forgets it in the window */
{
    assert(word(o, expected(o), w) == (value));
    word(o, expected(o), w) = 0
}

inline post(box, owed, o)       /* Isend of the newest: nothing is owed then */
{
    assert(box == 0);
    box = taken[o];
    owed = false
}

#ifdef FAULT_BOX_OVERWRITTEN
#define reply_complete(o) true
#else
#define reply_complete(o) (reply[o] == 0)
#endif

inline take()                   /* Win.Sync, then read, merge, acknowledge; never waits */
{
#ifdef FAULT_ACK_BEFORE_MERGE
    ack[o] = expected(o);
#endif
    d_step { read(HEADER, expected(o)) }
    d_step {
#if defined(FAULT_NO_SYNC)
        iterations = early % 8;
        assert(early == content(expected(o), iterations));
#elif defined(FAULT_WIDE_RECORD)
        iterations = window[o].record[slot(expected(o))] % 8;
        assert(window[o].record[slot(expected(o))] == content(expected(o), iterations));
#else
        iterations = word(o, expected(o), DATA) % 8;
#endif
        read(DATA, content(expected(o), iterations))
    }
    d_step {
        read(TRAILER, expected(o));
        merged[o] = merged[o] + iterations;
        taken[o]++;
        owes_reply[o] = owes_reply[o] || taken[o] % REPLY_PERIOD == 0;
#ifndef FAULT_ACK_BEFORE_MERGE
        if
        :: ack[o] == 0 -> post(ack[o], owes_ack[o], o)
        :: else -> owes_ack[o] = true
        fi;
#endif
        iterations = 0;
        o = 0
    }
}

inline send_reply(worker)
{
    d_step { owes_reply[worker] && reply_complete(worker) -> post(reply[worker], owes_reply[worker], worker) }
#ifdef FAULT_SERVER_FLUSH
    reply[worker] == 0
#endif
}

proctype Server()
{
    bool owes_ack[ORIGINS];
    bool owes_reply[ORIGINS];
    byte iterations = 0;        /* in the message being read */
    byte o = 0;                 /* whose message it is */
#ifdef FAULT_NO_SYNC
    byte early = 0;
#endif
end_poll:
    do
#ifdef FAULT_NO_SYNC
    :: early = word(0, expected(0), DATA);
       if :: d_step { arrived(0) -> poll(0) } take() :: else fi
    :: early = word(1, expected(1), DATA);
       if :: d_step { arrived(1) -> poll(1) } take() :: else fi
#else
    :: d_step { arrived(0) -> poll(0) } take()
    :: d_step { arrived(1) -> poll(1) } take()
#endif
    /* Test says that the Isend before is complete */
    :: d_step { owes_ack[0] && ack[0] == 0 -> post(ack[0], owes_ack[0], 0) }
    :: d_step { owes_ack[1] && ack[1] == 0 -> post(ack[1], owes_ack[1], 1) }
    :: send_reply(0)
    :: send_reply(1)
    od
}

init {
    atomic {
        run Server();           /* process 1 */
        run Link(0); run Link(1);
        run Origin(0); run Origin(1);
        run Trouble()
    }
}

#ifdef NO_WAIT_CLAIM
#define SERVER 1
never {
    do
    :: assert(_nr_pr <= 2 || Server[SERVER]@end_poll || enabled(SERVER))
    od
}
#endif
