/* The peer of tls.py: receives bytes from TLS connections, no more.

       ./bare_tls CERTIFICATE KEY CHUNK_BYTES CONNECTIONS

   Prints its port, then the CPU seconds from the last handshake on and the bytes that it received.
   One thread and one epoll, as a server has. It answers each chunk with one byte, so that its
   devices come at the pace of a server's. */

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

struct sender {
    SSL *tls;
    long at; /* bytes of the present chunk */
};

static double cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int count, char **given) {
    if (count != 5) return 2;
    long chunk_bytes = atol(given[3]), total = 0;
    int connections = atoi(given[4]), open_now = connections;
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    if (SSL_CTX_use_certificate_file(context, given[1], SSL_FILETYPE_PEM) != 1) return 3;
    if (SSL_CTX_use_PrivateKey_file(context, given[2], SSL_FILETYPE_PEM) != 1) return 3;
    SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);

    int listening = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (bind(listening, (struct sockaddr *)&address, length) || listen(listening, 64)) return 4;
    getsockname(listening, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);

    char *room = calloc(connections, chunk_bytes);
    struct sender *senders = calloc(connections, sizeof *senders);
    for (int i = 0; i < connections; i++) {
        int accepted = accept(listening, NULL, NULL);
        senders[i].tls = SSL_new(context);
        SSL_set_fd(senders[i].tls, accepted);
        if (SSL_accept(senders[i].tls) != 1) return 5;
        fcntl(accepted, F_SETFL, O_NONBLOCK);
        struct epoll_event wanted = {.events = EPOLLIN, .data.u32 = i};
        epoll_ctl(poll, EPOLL_CTL_ADD, accepted, &wanted);
    }
    double began_s = cpu_s();
    while (open_now) {
        struct epoll_event ready[64];
        int found = epoll_wait(poll, ready, 64, -1);
        for (int i = 0; i < found; i++) {
            int number = ready[i].data.u32;
            struct sender *sender = &senders[number];
            char *chunk = room + number * chunk_bytes;
            int got;
            ERR_clear_error(); /* another connection may have left one */
            while ((got = SSL_read(sender->tls, chunk + sender->at, chunk_bytes - sender->at)) > 0) {
                total += got;
                sender->at += got;
                if (sender->at == chunk_bytes) {
                    sender->at = 0;
                    if (SSL_write(sender->tls, "k", 1) != 1) return 6;
                }
            }
            if (SSL_get_error(sender->tls, got) != SSL_ERROR_WANT_READ) {
                epoll_ctl(poll, EPOLL_CTL_DEL, SSL_get_fd(sender->tls), NULL);
                close(SSL_get_fd(sender->tls));
                open_now--;
            }
        }
    }
    printf("%f %ld\n", cpu_s() - began_s, total);
    return 0;
}
