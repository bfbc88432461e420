/* What a cloud's metadata service, another address or a command says of the end of this machine. Pure. Formats as in
 * the vendors' documentation: Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance rebalance
 * recommendations"; Google Compute Engine, "Create and use Spot VMs" (instance/preempted); Azure Metadata Service,
 * "Scheduled Events for Linux VMs" (api-version 2020-07-01). */
#ifndef EVEN_ORCHESTRATOR_ANNOUNCEMENT_H
#define EVEN_ORCHESTRATOR_ANNOUNCEMENT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_ANNOUNCEMENT_WORDS = 96, EVEN_ANNOUNCEMENT_NAME = 128 };

typedef struct even_announcement {
  bool due;                           /* the machine's end is announced */
  int64_t at;                         /* when, in seconds since 1970 (UTC); 0: that is not said */
  double seconds;                     /* so long after this answer; < 0: that is not said */
  char what[EVEN_ANNOUNCEMENT_WORDS]; /* by what: "terminate"; fit for a terminal */
} even_announcement;

/* All of these: EVEN_ERR_INPUT where the answer is none of that service's. Nothing announced is no error. */
/* spot/instance-action: 404 while nothing is. */
even_status even_announcement_of_aws(int status, const char *body, size_t bytes, even_announcement *out) EVEN_MUST_USE;
/* events/recommendations/rebalance: 404 while nothing is. Names no end. */
even_status even_announcement_of_aws_rebalance(int status, const char *body, size_t bytes,
                                               even_announcement *out) EVEN_MUST_USE;
/* instance/preempted: TRUE or FALSE; 30 s are left then. */
even_status even_announcement_of_gcp(int status, const char *body, size_t bytes, even_announcement *out) EVEN_MUST_USE;
/* scheduledevents: the first to come of those that end the machine of that name (Preempt, Terminate, Reboot, Redeploy).
 * Freeze is none. A Reboot or Redeploy that has begun is none either: who runs after it sees it for minutes. */
even_status even_announcement_of_azure(int status, const char *body, size_t bytes, const char *name,
                                       even_announcement *out) EVEN_MUST_USE;
/* Of an address of the user's own: 204 and 404, and a body that is empty, 0, false, no or none, are nothing; else there
 * is notice, with a number in so many seconds. */
even_status even_announcement_of_text(int status, const char *body, size_t bytes, even_announcement *out) EVEN_MUST_USE;
/* Of a command that ended with 0: it is notice, with the seconds where its output is a number; 0, false, no or none are
 * nothing there, too (what it asked may have said so), but no output at all is notice. */
void even_announcement_of_command(const char *output, size_t bytes, even_announcement *out);

/* "2017-09-18T08:22:00Z" or "Mon, 19 Sep 2016 18:29:47 GMT", in seconds since 1970; false: it is neither. */
bool even_announcement_instant(const char *text, int64_t *out);

#endif
