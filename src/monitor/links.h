/* Links between hosts that have become slower than they were: which host's, by how much. The ranks that speak to other
 * hosts tell what each way from there took (even_leg_record), in exchanges in which nobody was waited for. Of three
 * hosts and more the one is named all of whose ways, to others or from them, are slow; of two nobody can say which. */
#ifndef EVEN_MONITOR_LINKS_H
#define EVEN_MONITOR_LINKS_H

#include <evenstep/status.h>
#include <evenstep/telemetry.h>
#include <stdbool.h>

typedef struct even_links even_links;

/* A link is slow from this factor on, and no more where three quarters of what is above 1 are gone: below 1.5. */
#define EVEN_LINK_BEGINS 3.0
enum {
  EVEN_LINK_LEARNS = 4, /* looks with figures before what is usual is known; the first one tells of a start */
  EVEN_LINK_LOOKS = 3,  /* in a row that must say so before it is told; and two before it is over */
  EVEN_LINK_HOSTS = 64  /* links of more are not looked at */
};

typedef struct even_link_news {
  bool over;
  int rank;  /* the first on the host whose link it is */
  int other; /* of two hosts: the first on the other one; else -1 */
  bool all;  /* those of the other hosts are slow, too: it is the network */
  double factor;
  double usual_seconds; /* of a transfer as large as those are now */
  double seconds;       /* now */
} even_link_news;

even_status even_links_open(even_links **out) EVEN_MUST_USE;
/* NULL is allowed. */
void even_links_close(even_links *links);
/* Another factor than the one above, from 1.5 on, and so many seconds of looks, from 1 on; 0: as they are. */
void even_links_limit(even_links *links, double begins, double seconds);
/* Other processes meet: what was usual is learnt anew. */
void even_links_forget(even_links *links);
/* What a rank told. */
void even_links_take(even_links *links, int rank, const even_leg_record *record);
/* About once a second, from what came since the last look. true: *news is to be told. A transfer that takes less than
 * `least_seconds` more than usual is not worth it. `excused`: by how many
 * seconds a transfer may be late because something else holds that rank's host up. */
typedef double even_links_excuse(const void *context, int rank);
bool even_links_look(even_links *links, double least_seconds, even_links_excuse *excused, const void *context,
                     even_link_news *news);
/* Whether any rank has told anything. */
bool even_links_known(const even_links *links);
/* Whether one is slow, and was told: *news as it was. */
bool even_links_lasts(const even_links *links, even_link_news *news);

#endif
