/* A process that outlives this one, however it ends, and then kills and removes what is left of a job. */
#ifndef EVEN_OS_GUARDIAN_H
#define EVEN_OS_GUARDIAN_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct even_guardian_page;

typedef struct even_guardian {
  pid_t pid;                       /* -1: none */
  int pipe;                        /* its other end; the guardian begins when nobody holds it any more */
  struct even_guardian_page *page; /* that both see; NULL: it was started by another process, which has left none */
  int page_fd;                     /* of that, where there is one */
} even_guardian;

/* Forks the guardian of the job whose processes carry `mark` ("NAME=value") in their environment. It has a session of
 * its own, cannot be ended by a terminal or a plain `kill`, and holds no descriptor of this process but the
 * standard ones. */
even_status even_guardian_start(const char *mark, even_guardian *out) EVEN_MUST_USE;
/* Tells it of a session to kill, of one that is no more, of a control group to remove. Where there is no room, for it
 * stands still and has heard nothing for long, it is let go on (SIGCONT), and waited for some seconds; then it is
 * killed, and gone as any that is: EPIPE. */
even_status even_guardian_add_session(even_guardian *guardian, pid_t leader) EVEN_MUST_USE;
even_status even_guardian_drop_session(even_guardian *guardian, pid_t leader) EVEN_MUST_USE;
even_status even_guardian_add_cgroup(even_guardian *guardian, const char *folder) EVEN_MUST_USE;
/* Whether it can be told something more without waiting. false: it stands still, and has heard nothing for long; or
 * this cannot be found out. */
bool even_guardian_has_room(const even_guardian *guardian);
/* Until when (even_clock_boot_ns) the sessions may run, whether the caller does or stands still: then it holds them
 * (SIGSTOP, again and again), lets them go (SIGCONT) when it is told a later time, and at kill_ns kills them, and goes
 * on watching. 0: for as long as the caller lives (as at first). Waits for nothing. Any thread. */
even_status even_guardian_limit(even_guardian *guardian, uint64_t until_ns, uint64_t kill_ns) EVEN_MUST_USE;
/* Whether it holds the sessions now; since when (held_ns) or, where it does not, when it let them go: 0: it never held
 * any. */
bool even_guardian_holds(const even_guardian *guardian, uint64_t *held_ns);
/* Of one that takes the place of another one that is gone, once it has been told of the sessions: the same limit, and
 * what that one held it holds, and lets go. `gone` is stopped afterwards, not before. */
even_status even_guardian_inherit(even_guardian *guardian, const even_guardian *gone) EVEN_MUST_USE;
/* Of one that an earlier process has started, whose end of the pipe is `pipe`, and who is gone: it is this one's from
 * now on, as is page_fd, that process's; -1: there is none, and the limit that it may have been told stays. */
even_status even_guardian_take(pid_t pid, int pipe, int page_fd, even_guardian *out) EVEN_MUST_USE;
/* Lets it do its work now, also where somebody has stopped it, and waits until it has ended, also where others hold the
 * pipe, too; for 20 s: then it is killed. */
void even_guardian_stop(even_guardian *guardian);
/* Lets go of one whose pipe others hold, too, without a word: it watches on, with the limit that it was told last. */
void even_guardian_leave(even_guardian *guardian);

#endif
