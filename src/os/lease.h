/* A folder that one process of several hosts has for itself, where these see it, but not each other's locks: it keeps a
 * sign there, whose time it moves while it lives.
 *
 * Relied on: open(O_EXCL) gives a name to one host alone, rename is one step, what is opened anew has the server's
 * times (close-to-open of NFS; clients that remember times for longer than EVEN_LEASE_NS see a living holder as a dead
 * one). No clock of another host is looked at. Method: leases (Gray and Cheriton, SOSP 1989), held by whoever renews
 * them; a holder that stood still for longer has lost it, and finds out before it goes on. */
#ifndef EVEN_OS_LEASE_H
#define EVEN_OS_LEASE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

#define EVEN_LEASE_SIGN "evenstep.running"
#define EVEN_LEASE_UNSEEN "evenstep.unseen" /* its name where its time does not move */

/* How long the sign of a living holder may stand still; how often it is renewed. What clients of NFS and sshfs remember
 * of a file that they do not open is up to half a minute old. */
#define EVEN_LEASE_NS (UINT64_C(30) * 1000000000u)
#define EVEN_LEASE_RENEW_NS (UINT64_C(3) * 1000000000u)

typedef struct even_lease even_lease;

typedef struct even_lease_params {
  const char *folder; /* which is there */
  const char *owner;  /* what the processes that take it over from one another have in common: no line end in it */
  uint64_t turn;      /* of the owner: one that is higher takes it at once */
  bool patient; /* a sign that stands still is waited for, EVEN_LEASE_NS; else it counts as a living one's. Not that of
                   a process that could be named from here, and is not there: it is taken at once */
  void (*tell)(void *context, const char *words); /* before it waits; may be NULL */
  void *context;
} even_lease_params;

/* Takes the folder. *out = NULL without an error, at once, where its file system is this host's alone (even_is_shared).
 * EVEN_ERR_IN_USE: a process that lives has it, which the message names; this is known once its sign has moved, after
 * some EVEN_LEASE_RENEW_NS. So is one whose sign cannot be read, or cannot be looked at for long enough: only time
 * between two looks that succeeded counts. EVEN_ERR_INTERRUPTED: even_stop_asked. Any other error (also: its time
 * cannot be moved): there is no sign of this one, and none of another's was harmed. The caller's thread alone renews it
 * until even_lease_keep. */
even_status even_lease_take(const even_lease_params *params, even_lease **out) EVEN_MUST_USE;
/* From now on a thread of its own renews it. Without one (an error) it is lost EVEN_LEASE_NS later. */
even_status even_lease_keep(even_lease *lease) EVEN_MUST_USE;
/* Looks whether the sign is this one's still, and moves its time. What cannot be looked at is not lost; a sign that is
 * gone is, where the next look misses it, too (whoever takes a living one for dead puts it back), or the last renewal
 * is older than EVEN_LEASE_NS. Any thread; returns at once where another one is at it. */
void even_lease_renew(even_lease *lease);
/* Before what nobody may do who has lost it: EVEN_ERR_IN_USE, and who has it now. Asks the server only where the last
 * renewal is older than EVEN_LEASE_NS. Any thread; NULL: there is no sign to lose. */
even_status even_lease_check(even_lease *lease) EVEN_MUST_USE;
/* The same after a new look, for as long as the server takes. */
even_status even_lease_ask(even_lease *lease) EVEN_MUST_USE;
/* Whether other hosts see it. false, for good: its time has not moved for half of EVEN_LEASE_NS although it was renewed
 * (a file system that ignores it), and so the sign has another name, and cannot be lost. Any thread; NULL: true. */
bool even_lease_is_seen(const even_lease *lease);
/* Its folder was renamed to this. Not while another thread may call even_lease_check. NULL is allowed. */
even_status even_lease_follow(even_lease *lease, const char *folder) EVEN_MUST_USE;
/* Ends the thread, removes the sign if it is this one's, and frees. NULL is allowed. Keeps the thread's last error. */
void even_lease_release(even_lease *lease);
/* The same, but for the sign: another process of this host, of the same owner, takes it over, and as long as it stands
 * there so does nobody else. */
void even_lease_leave(even_lease *lease);

#endif
