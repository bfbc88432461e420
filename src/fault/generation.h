/* Membership of a job, in memory that an agent and its ranks share. The agent alone says who is in it: each time it
 * sees a rank's process end it makes a new generation, of those that are left, and so all have the same members
 * whatever they noticed themselves, and when. It makes one with a process more where that has offered itself and all
 * members stand between two steps. Ranks say whether they could go on without another, where to meet, and where what a
 * newcomer needs lies. Of several hosts each has such memory of its own, with all ranks of the job; that of the job's
 * leader counts, and the other agents' follow it. */
#ifndef EVEN_FAULT_GENERATION_H
#define EVEN_FAULT_GENERATION_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct even_generation even_generation;

#define EVEN_GENERATION_WORDS 200 /* with the NUL */

/* A new segment, generation 0: all are members, none has said that it could go on. *fd is the caller's, close-on-exec.
 */
even_status even_generation_create(int ranks, int *fd) EVEN_MUST_USE;
/* Maps the segment; the caller keeps `fd`. EVEN_ERR_INPUT: it is none of these. */
even_status even_generation_open(int fd, even_generation **out) EVEN_MUST_USE;
/* NULL is let be. */
void even_generation_close(even_generation *generation);
int even_generation_ranks(const even_generation *generation);

/* The newest, 0 at the start of an attempt. Any thread, as all that follow. */
uint32_t even_generation_number(const even_generation *generation);
/* Whether the rank is a member of that generation, the newest or one of the EVEN_GENERATIONS_KEPT - 1 before it. */
bool even_generation_has(const even_generation *generation, int rank, uint32_t number);
/* Returns when there is a newer one than `after`, when the agent has given the attempt up, or after timeout_ns; the
 * newest. */
uint32_t even_generation_wait(even_generation *generation, uint32_t after, uint64_t timeout_ns);
/* Whether the agent has given the attempt up: nobody goes on. */
bool even_generation_refused(const even_generation *generation);
/* The process that has the rank's place; 0: none yet. */
uint32_t even_generation_process(const even_generation *generation, int rank);

enum { EVEN_GENERATIONS_KEPT = 64, EVEN_GENERATION_ADDRESS = 64 /* with the NUL */ };

/* What the agent asks of the members at the end of the step under way. */
typedef enum even_generation_wish {
  EVEN_WISH_NOTHING,
  EVEN_WISH_STAND, /* somebody can join: stand between two steps, until there is a newer generation */
  EVEN_WISH_SAVE   /* they are too few: write a checkpoint, then the same */
} even_generation_wish;

/* ---- ranks ---- */

/* Says that the rank could go on without others (why ""), or in a few words why not; until it says so it cannot. */
void even_generation_say(even_generation *generation, int rank, const char *why);
/* Before es.prepare. early: 1 + how many calls the rank had made before the one that all make and in which it is; it
 * could go on without others that have come to that one, too (not without who may be doing what it waits for, be it in
 * an earlier call or on its way out of that, nor without the main one, whose values of the models nobody else may
 * have). 0: it has come out of it, and has said nothing. */
void even_generation_say_early(even_generation *generation, int rank, uint64_t early);
/* The first member says on which port of its host (1 … 65535) those of this generation meet. Of an older one than what
 * was said before: nothing. */
void even_generation_meet(even_generation *generation, uint32_t number, uint32_t port);
/* That port, and the address of its host ("": this one); 0 where it was not said within timeout_ns, or this generation
 * is over. */
uint32_t even_generation_port(even_generation *generation, uint32_t number, uint64_t timeout_ns,
                              char address[EVEN_GENERATION_ADDRESS]);
even_generation_wish even_generation_wished(const even_generation *generation);
/* Whether other processes may become members: they cannot make what calls the members have made. */
bool even_generation_takes_in(const even_generation *generation);
/* A member stands between two steps, and stays there until there is a newer generation than `number`, its own. */
void even_generation_stand(even_generation *generation, int rank, uint32_t number);
/* A call of the member's has failed in the generation `number`, its own, for another rank: it waits for a newer one. */
void even_generation_doubt(even_generation *generation, int rank, uint32_t number);
/* A process that is no member could be one. */
void even_generation_offer(even_generation *generation, int rank);
/* A member says that the state of training, for those that are new in this generation, lies in its descriptor `fd`. */
void even_generation_give(even_generation *generation, int rank, uint32_t number, int fd);
/* Where that lies: false while nobody has said so. */
bool even_generation_given(const even_generation *generation, uint32_t number, uint32_t *process, int *fd);
/* Whether the member shall give it though nobody of its host needs it: it goes to newcomers of other hosts. */
bool even_generation_gives_away(const even_generation *generation, int rank, uint32_t number);
/* Why it does not come, in a few words: false where nothing is known to hinder it. */
bool even_generation_ungiven(const even_generation *generation, uint32_t number, char why[EVEN_GENERATION_WORDS]);
/* A newcomer has opened it: whoever holds it may let it go. */
void even_generation_take(even_generation *generation, int rank, uint32_t number);

/* ---- the agent ---- */

/* Before an attempt whose ranks have not started: as new. members: of generation 0; NULL: all. */
void even_generation_begin(even_generation *generation, const bool *members);
/* Other processes may become members, in each attempt. */
void even_generation_let_in(even_generation *generation);
/* The rank's process has ended, and another one may come: nothing is said of it yet. */
void even_generation_vacate(even_generation *generation, int rank);
/* A process has started in the rank's place. */
void even_generation_started(even_generation *generation, int rank, uint32_t process);
/* Whether all ranks but those in `lost` could go on; else *rank is one that could not, or of the lost ones one that
 * others in a call before es.prepare may wait for, and `why` the reason. */
bool even_generation_able(const even_generation *generation, const bool *lost, int *rank,
                          char why[EVEN_GENERATION_WORDS]);
/* A new generation of those members that are not in `lost`; its number. */
uint32_t even_generation_lose(even_generation *generation, const bool *lost);
/* A new generation of the members and of those in `joining` (NULL: nobody, so that who stands goes on), of whom nothing
 * is asked; its number. */
uint32_t even_generation_grow(even_generation *generation, const bool *joining);
/* Whether the rank's process has offered itself, and is no member. */
bool even_generation_offers(const even_generation *generation, int rank);
/* Whether the rank is a member of the newest generation and stands in it. */
bool even_generation_stands(const even_generation *generation, int rank);
/* Whether the rank is a member of the newest generation and waits for a newer one. */
bool even_generation_doubts(const even_generation *generation, int rank);
void even_generation_ask(even_generation *generation, even_generation_wish wish);
/* Has all who wait look again: an agent before may have been killed before it told them of what it had written. */
void even_generation_retell(even_generation *generation);
/* Nobody goes on: who waits for a new generation fails at once. */
void even_generation_refuse(even_generation *generation);
/* The member shall give the state of training in that generation, of which nothing was made known yet, to other hosts'.
 */
void even_generation_ask_away(even_generation *generation, int rank, uint32_t number);
/* Where the state lies that this member has given: false while it has not. */
bool even_generation_gift(const even_generation *generation, int rank, uint32_t number, uint32_t *process, int *fd);
/* The state has come from another host: it lies in this descriptor of that process. */
void even_generation_bring(even_generation *generation, uint32_t number, uint32_t process, int fd);
/* It does not come from another host, or the member of this one that shall give it cannot: why. */
void even_generation_fail_bringing(even_generation *generation, uint32_t number, const char *why);
/* Whether the rank's process has taken the state of that generation, or of a later one. */
bool even_generation_took(const even_generation *generation, int rank, uint32_t number);

/* ---- agents of several hosts ---- */

/* What a rank has said. */
typedef struct even_generation_words {
  bool said; /* whether it could go on, or why not: `why` */
  bool offers;
  uint64_t early;  /* 1 + the calls before that in which it waits before es.prepare; 0: it is in none */
  uint64_t stands; /* 1 + the generation in which it stands between two steps; 0: it does not */
  uint64_t took;   /* 1 + the generation of which it took the state; 0: it did not */
  uint64_t doubts; /* the same of the one in which a call of it has failed for another rank */
  char why[EVEN_GENERATION_WORDS];
} even_generation_words;

void even_generation_hear(const even_generation *generation, int rank, even_generation_words *out);
/* A rank of another host has said so, there. */
void even_generation_repeat(even_generation *generation, int rank, const even_generation_words *words);
/* The leader's newest generation has these members (all ranks'): false where it is not the one after this one's. */
bool even_generation_follow(even_generation *generation, uint32_t number, const bool *members);
/* Of a host that comes when others are at this generation already, and has heard of none: the same for that one. */
bool even_generation_adopt(even_generation *generation, uint32_t number, const bool *members);
/* Its first member, of another host, meets the others there. Longer addresses than EVEN_GENERATION_ADDRESS - 1 bytes
 * are cut off. */
void even_generation_place(even_generation *generation, uint32_t number, uint32_t port, const char *address);

#endif
