/* Who waits for whom, and who of them never gets on: numbers in, numbers out, no clock, no memory of others. */
#ifndef EVEN_COMM_CIRCLE_H
#define EVEN_COMM_CIRCLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EVEN_WAITS 4 /* threads of a process whose waits are told */
#define EVEN_WAITS_WHOM 8
#define EVEN_CIRCLE_MEMBERS 32 /* that are told that they are in one */

/* A thread's wait: `whom[i]`, as that process is at its change `at[i]`, has not brought what is waited for, and does
 * nothing that could before its next change. */
typedef struct even_circle_wait {
  uint32_t any;                   /* 1: any of `whom` will do; else all of them have to come */
  uint32_t whoms;                 /* at most EVEN_WAITS_WHOM */
  uint64_t whom[EVEN_WAITS_WHOM]; /* processes; 0: one of which nothing is known */
  uint64_t at[EVEN_WAITS_WHOM];   /* 0: whom it stands for alone can say (crossed.c) */
} even_circle_wait;

/* A process at one of its changes, at which all of its threads wait, or do nothing until one of those that wait has
 * got on. True of that change for ever, whenever it is read. */
typedef struct even_circle_process {
  uint64_t process; /* no other's, and not 0 */
  uint64_t change;  /* not 0 */
  uint32_t waits;   /* at most EVEN_WAITS */
  bool stuck;
  bool shown;
  even_circle_wait wait[EVEN_WAITS];
} even_circle_process;

/* What a process says of itself in a group when it is asked, all of it of one moment; the rank that asked keeps it. */
typedef struct even_circle_answer {
  uint64_t process;
  uint64_t change; /* at which it waits; 0: it does not, or nothing was said yet */
  uint64_t calls;  /* the last of the group's calls of which it has told the others that it has come, */
  uint64_t steps;  /* and so many of its steps for which it has sent what it has to the others */
  uint64_t sent;   /* messages that it has sent to the one that asked */
} even_circle_answer;

/* Whether it waits and had not come to that call; or had sent nothing for its step of that number, from 0 on; or no
 * message but the `heard` ones that have come. What is
 * on its way is none of it, however long it takes. */
static inline bool even_circle_lacks_call(const even_circle_answer *answer, uint64_t call) {
  return answer->change != 0 && answer->calls < call;
}
static inline bool even_circle_lacks_step(const even_circle_answer *answer, uint64_t call, uint64_t step) {
  return even_circle_lacks_call(answer, call) ||
         (answer->change != 0 && answer->calls == call && answer->steps <= step);
}
static inline bool even_circle_lacks_message(const even_circle_answer *answer, uint64_t heard) {
  return answer->change != 0 && answer->sent == heard;
}

/* Who is in a circle, and at which change. */
typedef struct even_circle_members {
  uint32_t count; /* at most EVEN_CIRCLE_MEMBERS */
  uint32_t unused;
  uint64_t process[EVEN_CIRCLE_MEMBERS];
  uint64_t change[EVEN_CIRCLE_MEMBERS];
} even_circle_members;

/* It needs that process, at that change, too; more than EVEN_WAITS_WHOM are not told, where all have to come those
 * first of which nothing is known. */
void even_circle_need(even_circle_wait *wait, uint64_t process, uint64_t change);
/* Which of them is the process at that change; -1: none. */
int even_circle_find(const even_circle_process *of, size_t count, uint64_t process, uint64_t change);
/* Sets `stuck` of those that never get on, as far as these words say. Of one that is, and is so now, all is proven: it
 * can go on only behind another that is stuck, and so the first of them to go on would have to be behind one that had
 * gone on before it. Words of different moments, and of different hosts, may be mixed. */
void even_circle_search(even_circle_process *of, size_t count);
/* For whom one that is stuck waits, who is it, too; -1: none. */
int even_circle_next(const even_circle_process *of, size_t count, size_t one);

/* Whether the process is among them; *change: at which change. */
bool even_circle_has(const even_circle_members *members, uint64_t process, uint64_t *change);
void even_circle_add(even_circle_members *members, uint64_t process, uint64_t change);
/* Makes of what another host has sent what can be read: its counts are in their bounds. */
void even_circle_bound_wait(even_circle_wait *wait);
void even_circle_bound_members(even_circle_members *members);

#endif
