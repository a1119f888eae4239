// Things by number in a row, first to last. Links lie in arrays, so that nothing is allocated after construction and any
// one of them can be taken out at once.
#pragma once

#include <stddef.h>

#include <vector>

namespace moeflux {

class Order {
public:
    explicit Order(int n) : end_(n), links_(size_t(n) + 1) { at(n) = {n, n}; }

    bool has(int i) const { return at(i).next >= 0; }
    bool empty() const { return at(end_).next == end_; }
    // -1 where there is none.
    int first() const { return real(at(end_).next); }
    int last() const { return real(at(end_).prev); }
    int next(int i) const { return real(at(i).next); }
    int prev(int i) const { return real(at(i).prev); }

    void push_back(int i) { insert(at(end_).prev, i); }
    void push_front(int i) { insert(end_, i); }
    void remove(int i) {
        Link& link = at(i);
        at(link.prev).next = link.next;
        at(link.next).prev = link.prev;
        link = {};
    }

private:
    struct Link {
        int prev = -1, next = -1;
    };
    Link& at(int i) { return links_[size_t(i)]; }
    const Link& at(int i) const { return links_[size_t(i)]; }
    int real(int i) const { return i == end_ ? -1 : i; }
    void insert(int after, int i) {
        const int before = at(after).next;
        at(i) = {after, before};
        at(after).next = i;
        at(before).prev = i;
    }

    int end_;
    std::vector<Link> links_;
};

}  // namespace moeflux
